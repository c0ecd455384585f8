"""Analysis of trained models: used frequencies (RoPE, PoPE), learned phases (PoPE), and gates and positions (CoPE)."""
