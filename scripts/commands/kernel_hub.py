"""`whatwhere kernel-hub`: its help is in `cli/kernel_hub.py`."""

import base64
import hashlib
import json
import pathlib
import re

import whatwhere
from whatwhere_cli.kernel_hub import BACKENDS, BUILDS, NAME, parser

PYTHON_NAME = NAME.replace("-", "_")
# The Hub's convention: 0 for kernels that are not recommended for production.
VERSION = 0
LICENSE = "Apache-2.0"
FUNCTIONS = {
    "cope_attention": "kernel_cope",
    "plain_attention": "kernel_plain",
    "pope_attention": "kernel_pope",
}

BUILD_TOML = """[general]
name = "{name}"
version = {version}
edition = 5
license = "{license}"
backends = [{backends}]

[general.hub]
repo-id = "{repo_id}"

[torch-noarch]
"""

FLAKE = """{
  inputs.kernel-builder.url = "github:huggingface/kernels";

  outputs =
    { self, kernel-builder }:
    kernel-builder.lib.genKernelFlakeOutputs {
      inherit self;
      path = ./.;
    };
}
"""

README = """---
library_name: kernels
license: {license_id}
---

# {name}

Causal attention in Triton: forward, backward and decoding, in memory linear in the length.

- `cope_attention`: contextual positions (CoPE, [2405.18719](https://arxiv.org/abs/2405.18719))
- `pope_attention`: polar coordinate positions (PoPE, [2509.10534](https://arxiv.org/abs/2509.10534))
- `plain_attention`: softmax attention, optionally with a decay (ALiBi, FoX) or relative positions

```python
import torch
from kernels import get_kernel

kernel = get_kernel("{repo_id}", version={version}, trust_remote_code=True)
query, key, value = torch.randn(3, 1, 4, 128, 64, device="cuda", requires_grad=True)  # batch, heads, length, channels
table = torch.zeros(64, 16, device="cuda", requires_grad=True)  # one column for each of 16 positions
out = kernel.cope_attention(query, key, value, table, scaling=64**-0.5, position_scale=1.0)
out.sum().backward()
```

`help(kernel.pope_attention)` describes the arguments. float32, bfloat16 and float16; heads of up to 256 channels;
grouped heads. NVIDIA GPUs of compute capability 8.0 or newer, or ROCm. No gradients of gradients.

Tested in Triton's interpreter, and compiled for GPUs, but not yet run on one.

Licence: [{license}](https://www.apache.org/licenses/LICENSE-2.0).
"""

INIT = '''"""CoPE, PoPE and plain causal attention in Triton."""

{imports}

__all__ = {functions}
'''

OPS = '''"""The namespace of this build's operators."""

import torch

_OPS_NAME = "{name}"

ops = getattr(torch.ops, _OPS_NAME)


def add_op_namespace_prefix(op_name: str) -> str:
    """Returns the name of an operator with its namespace."""
    return f"{{_OPS_NAME}}::{{op_name}}"
'''


def kernel_source(text: str) -> str:
    """Returns a file of `modeling` for the kernel, whose `_ops` gives the namespace of the operators."""
    if "_NAMESPACE" not in text:
        return text
    text = re.sub(r"^import hashlib\n", "", text, count=1, flags=re.MULTILINE)
    text = re.sub(r"^(# .*\n)?_NAMESPACE = .*\n\n", "", text, count=1, flags=re.MULTILINE)
    # kernel-builder looks for calls of this function.
    text = re.sub(r'f"\{_NAMESPACE\}::(.+?)"', r'add_op_namespace_prefix(f"\1")', text)
    own = "import torch\n\nfrom ._ops import add_op_namespace_prefix\n"
    text = re.sub(r"^import torch\n", own, text, count=1, flags=re.MULTILINE)
    assert "_NAMESPACE" not in text, "an operator has another namespace"
    return text


def sources() -> dict[str, str]:
    """Returns the files of the kernel's Python package by name, without `_ops.py`, which belongs to a build."""
    folder = pathlib.Path(whatwhere.__file__).parent
    files = {path.name: kernel_source(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("kernel_*.py"))}
    imports = "\n".join(f"from .{module} import {function}" for function, module in FUNCTIONS.items())
    return {"__init__.py": INIT.format(imports=imports, functions=json.dumps(list(FUNCTIONS))), **files}


def project(repo_id: str) -> dict[str, str]:
    """Returns the files of a project of kernel-builder, by path."""
    values = {"name": NAME, "version": VERSION, "license": LICENSE, "repo_id": repo_id}
    readme = README.format(**values, license_id=LICENSE.lower())
    build = BUILD_TOML.format(**values, backends=", ".join(f'"{backend}"' for backend in BACKENDS))
    package = {f"torch-ext/{PYTHON_NAME}/{name}": text for name, text in sources().items()}
    # kernel-builder uploads CARD.md as the README of the repository on the Hub.
    return {"build.toml": build, "flake.nix": FLAKE, "README.md": readme, "CARD.md": readme, **package}


def built(backend: str) -> dict[str, str]:
    """Returns the files of a build, by name."""
    files = sources()
    identity = hashlib.sha256("".join(files.values()).encode()).hexdigest()[:8]
    name = f"_{PYTHON_NAME}_{backend}_{identity}"
    files["_ops.py"] = OPS.format(name=name)
    digests = {file: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for file, text in files.items()}
    metadata = {
        "name": NAME,
        "id": name,
        "version": VERSION,
        "license": LICENSE,
        "python-depends": [],
        "kernel-depends": [],
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": digests},
    }
    return {**files, "metadata.json": json.dumps(metadata, indent=2) + "\n"}


def main(arguments: list[str] | None = None) -> None:
    """Writes the folder."""
    parsed = parser().parse_args(arguments)
    output: pathlib.Path = parsed.output
    files = project(parsed.repo_id)
    for backend in BUILDS if parsed.build else ():
        files |= {f"build/torch-{backend}/{name}": text for name, text in built(backend).items()}
    for name, text in files.items():
        path = output / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
    print(f"{len(files)} files in {output}")
