"""No position encoding (NoPE): a causal decoder that learns order from the mask alone."""

from .position_base import PositionEncoding


class NoPositionEncoding(PositionEncoding):
    """Plain causal attention (Haviv et al. 2022, arXiv 2203.16634). No parameters, no limit on length."""

    name = "none"
    paper = "Haviv et al. 2022 (2203.16634)"
    summary = "no position encoding (NoPE)"
