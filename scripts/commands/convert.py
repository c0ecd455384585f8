"""`whatwhere convert`: see `conversion/folder.py`."""

import re
import shlex

from whatwhere_cli.convert import parser

from ..cards.folder import write_card
from ..conversion.encoding import fit_message
from ..conversion.folder import convert_folder
from ..errors import program


def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    encoding = options.position_encoding, options.position_encoding_parameters, options.rope_parameters
    files = {
        "gguf_file": options.gguf_file,
        "calibration_file": options.calibration_file,
        "exact": options.exact,
        "stock": options.stock,
    }
    model, new, dropped, errors = convert_folder(options.source, options.output, *encoding, **files)
    if options.stock:
        print(f"{options.output}: stock {model.config.model_type}, {model.num_parameters():,} parameters.")
        return
    if errors:
        print(fit_message(errors))
    count = sum(parameter.numel() for name, parameter in model.named_parameters() if name in new)
    print(f"{options.output}: {model.num_parameters():,} parameters, of which {count:,} are new.")
    # The card loads it again, for its sample.
    del model
    write_card(options.output)
    for title, names in (("new", new), ("not used", dropped)):
        # One line for all layers.
        for name in dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names):
            print(f"  {title}: {name}")
    print(f"Next: {shlex.join(program())} finetune {options.output} --train-file FILES --output RUN")
