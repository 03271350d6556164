"""`convert_openvino.py CHECKPOINT PRECISION FOLDER`: the checkpoint as an OpenVINO model."""

import sys

from optimum.exporters.openvino import main_export
from optimum.intel import OVConfig, OVWeightQuantizationConfig

CONFIGS = {
    "float32": OVConfig(dtype="fp32"),
    # The checkpoint's own type stays.
    "bfloat16": None,
    "int8": OVConfig(quantization_config=OVWeightQuantizationConfig(bits=8)),
}


def main(checkpoint: str, precision: str, folder: str) -> None:
    main_export(checkpoint, folder, task="text-generation-with-past", ov_config=CONFIGS[precision])


if __name__ == "__main__":
    main(*sys.argv[1:])
