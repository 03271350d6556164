"""What a model's modules are called elsewhere: by transformers, by what quantises, and in some files. Free of torch.

Names are those of the first checkpoints that were published of a family. transformers has moved modules since, and
vLLM has names of its own: lists of modules have the names that a module had where they were written.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class OtherNames:
    """`rules`: what names begin with elsewhere, and here; one after the other."""

    rules: tuple[tuple[str, str], ...] = ()

    def here(self, name: str) -> str:
        """What a module, or a tensor, is called here that has this name elsewhere."""
        for there, here in self.rules:
            name = _renamed(name, there, here)
        return name

    def anywhere(self, name: str) -> list[str]:
        """The name of a module here, and all that it has elsewhere."""
        names = [name]
        for there, here in reversed(self.rules):
            names += [other for each in names if (other := _renamed(each, here, there)) != each]
        return names


def _renamed(name: str, before: str, after: str) -> str:
    """`before` and `after` end with a dot, as the name of the very module that they stand for does not."""
    if not f"{name}.".startswith(before):
        return name
    return (after + f"{name}.".removeprefix(before)).removesuffix(".")


SAME_NAMES = OtherNames()
# Gemma 3 and Mistral 3.
LLAVA_NAMES = OtherNames(
    (
        ("model.language_model.", "language_model.model."),
        ("lm_head.", "language_model.lm_head."),
        ("model.vision_tower.", "vision_tower."),
        ("model.multi_modal_projector.", "multi_modal_projector."),
        # SigLIP's, by transformers 4 and in the checkpoints of its time.
        ("vision_tower.vision_model.", "vision_tower."),
    )
)
QWEN2_VL_NAMES = OtherNames(
    (
        ("model.language_model.", "model."),
        ("model.visual.", "visual."),
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
    )
)
# Gemma 4, Qwen3-VL and 3.5: what is published has transformers' names.
NESTED_NAMES = OtherNames(
    (
        ("language_model.model.", "model.language_model."),
        ("language_model.lm_head.", "lm_head."),
        ("visual.", "model.visual."),
        ("vision_tower.", "model.vision_tower."),
        ("embed_vision.", "model.embed_vision."),
    )
)
