"""Whatever an image's file has: the engine never stumbles over it."""

from io import BytesIO

import pytest
from PIL import Image

from headrace.engine.errors import InvalidRequestError
from headrace.engine.vision import image_files
from headrace.engine.vision.image_size import Grid
from headrace.engine.vision.prompt_images import PromptImage
from headrace.engine.vision.reading import split_images

from .seeing import picture, png


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    image.save(data := BytesIO(), kind, **options)
    return data.getvalue()


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("1", "PNG"), ("LA", "PNG"), ("P", "GIF"), ("I;16", "PNG"), ("RGBA", "WEBP"), ("CMYK", "JPEG"), ("F", "TIFF")],
)
def test_colours_are_read_as_transformers_reads_them(oracle, mode, kind):
    image = Image.new("F" if mode == "F" else mode, (60, 90), 40 if mode in ("F", "I;16", "1", "P") else None)
    data = saved(image, kind)
    expected = image_files.scale(Image.open(BytesIO(data)).convert("RGB"), oracle.vision)
    shown = PromptImage.of(data, oracle.vision)
    assert (shown.pixels() == expected).all()


def test_of_moving_images_the_first_is_shown(oracle):
    frames = [picture(60, 90, seed) for seed in range(3)]
    for kind in ("GIF", "WEBP"):
        data = saved(frames[0], kind, save_all=True, append_images=frames[1:])
        expected = image_files.scale(Image.open(BytesIO(data)).convert("RGB"), oracle.vision)
        assert (PromptImage.of(data, oracle.vision).pixels() == expected).all()


def test_a_turned_tiff_is_turned_once(oracle):
    exif = Image.Exif()
    exif[0x0112] = 6
    upright = picture(90, 60)
    data = saved(upright.transpose(Image.Transpose.ROTATE_90), "TIFF", exif=exif)
    assert (PromptImage.of(data, oracle.vision).pixels() == image_files.scale(upright, oracle.vision)).all()


def test_an_image_of_another_size_than_its_file_began_with_is_refused(oracle):
    """Its tokens have their places: more or less of them would end the whole step."""
    shown = PromptImage(png(picture(60, 90)), Grid(1, 1), oracle.vision)
    with pytest.raises(InvalidRequestError, match="another size than its first bytes say"):
        shown.pixels()


def test_colours_that_cannot_be_converted_are_that_images_fault(oracle, monkeypatch):
    def convert(image, mode):
        raise ValueError(f"conversion from {image.mode} to {mode} not supported")

    shown = PromptImage.of(png(picture(60, 90).convert("L")), oracle.vision)
    monkeypatch.setattr(Image.Image, "convert", convert)
    with pytest.raises(InvalidRequestError, match=r"can be read .*: conversion from L to RGB not supported"):
        shown.pixels()


def test_parts_have_no_fields_without_a_value():
    """A table's parts all have all fields, and templates ask whether there is one: 'image' in part."""
    text = {"type": "text", "text": "What?", "image": None, "image_url": None}
    messages = [{"role": "user", "content": [{"type": "image", "image": b"file", "text": None}, text]}]
    ((message,), pictures) = split_images(messages)
    assert message["content"] == [{"type": "image"}, {"type": "text", "text": "What?"}]
    assert pictures == [b"file"]
