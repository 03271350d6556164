"""Images for the offline face, given as vLLM's users give them."""

import sys
from base64 import b64encode

import pytest
from safetensors.torch import load_file, save_file

from headrace.engine.errors import ConfigError, InvalidRequestError
from headrace.engine.llm import LLM, Prompt
from headrace.engine.lora_request import LoRARequest
from headrace.engine.offline.beam_search import BeamSearchParams
from headrace.engine.sampling_params import SamplingParams

from ..lora.adapters import ATTENTION, merged, save_adapter
from .seeing import IMAGE, VISION_END, VISION_START, Oracle, picture, png

CAT, DOG = picture(60, 90), picture(112, 84)
PLACE = f"{VISION_START}{IMAGE}{VISION_END}"
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
URL = f"data:image/png;base64,{b64encode(png(CAT)).decode()}"


@pytest.fixture(scope="module")
def llm(oracle) -> LLM:
    return LLM(oracle.folder, num_gpu_blocks_override=64, max_num_batched_tokens=32)


def says(*parts):
    return [{"role": "user", "content": list(parts)}]


def answer(oracle, output, *images):
    """What transformers answers to the tokens of an output's prompt."""
    return oracle.answer(oracle.request("", max_tokens=12).of_row("", output.prompt_token_ids, GREEDY), *images)


def test_prompts_with_their_images(oracle, llm):
    text = f"Look: {PLACE} and {PLACE}!"
    prompts = [
        {"prompt": text, "multi_modal_data": {"image": [CAT, png(DOG)]}},
        {"prompt": f"{PLACE}?", "multi_modal_data": {"image": DOG}},
        {"prompt": "Without."},
        "Without.",
    ]
    prompts.append({"prompt_token_ids": llm.get_tokenizer().encode(text), "multi_modal_data": {"image": [CAT, DOG]}})
    outputs = llm.generate(prompts, GREEDY)
    shown = [[CAT, DOG], [DOG], [], [], [CAT, DOG]]
    assert [list(each.outputs[0].token_ids) for each in outputs] == [
        answer(oracle, output, *images) for output, images in zip(outputs, shown, strict=True)
    ]
    assert [output.prompt for output in outputs] == [text, f"{PLACE}?", "Without.", "Without.", None]
    samples = llm.generate(prompts[1], SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=4))[0].outputs
    assert len({sample.token_ids for sample in samples}) == 3


def test_chats_with_images(oracle, llm):
    chats = [
        says({"type": "image_url", "image_url": {"url": URL}}, {"type": "text", "text": "What?"}),
        says({"type": "text", "text": "And this: "}, {"type": "image_pil", "image_pil": DOG}),
        [{"role": "user", "content": "Nothing."}],
    ]
    outputs = llm.chat(chats, GREEDY)
    for output, images in zip(outputs, ([CAT], [DOG], []), strict=True):
        assert list(output.outputs[0].token_ids) == answer(oracle, output, *images)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt": "No place", "multi_modal_data": {"image": CAT}}, "prompt 0: prompt has 0 places for images"),
        ({"prompt": PLACE}, "prompt 0: prompt has 1 image tokens, but its images are 0 tokens"),
        ({"prompt": PLACE, "multi_modal_data": {"image": b"?"}}, "image 1 of the prompt is no image that can be read"),
        (
            {"prompt": PLACE, "multi_modal_data": {"image": 7}},
            "image 1 of the prompt must be a file's bytes or a Pillow",
        ),
        ({"prompt": PLACE, "multi_modal_data": {"video": CAT}}, "other kinds are not read"),
    ],
)
def test_what_can_not_run_is_named(llm, prompt, message):
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(prompt, GREEDY)


def test_what_does_not_go_together_is_refused(oracle, llm, checkpoint):
    with pytest.raises(InvalidRequestError, match="beam_search takes no prompts with images"):
        llm.beam_search({"prompt": PLACE, "multi_modal_data": {"image": CAT}}, BeamSearchParams(2, 3))
    draft = {"method": "draft_model", "model": str(checkpoint("llama").folder), "num_speculative_tokens": 2}
    with pytest.raises(ConfigError, match="draft_model is not supported with a model that reads images"):
        LLM(oracle.folder, num_gpu_blocks_override=64, speculative_config=draft)
    blind = LLM(checkpoint("llama").folder, num_gpu_blocks_override=64, skip_tokenizer_init=True)
    with pytest.raises(InvalidRequestError, match="reads no images: leave them out"):
        blind.generate({"prompt_token_ids": [1, 2], "multi_modal_data": {"image": CAT}}, GREEDY)


def test_an_adapter_with_the_names_of_today(oracle, tmp_path):
    """transformers calls a Qwen2.5-VL's decoder otherwise than checkpoints do, and PEFT as it is called there."""
    adapter = save_adapter(oracle.folder, tmp_path, targets=ATTENTION)
    saved = load_file(file := adapter / "adapter_model.safetensors")
    save_file({name.replace(".layers.", ".language_model.layers."): saved[name] for name in saved}, file)
    llm = LLM(oracle.folder, num_gpu_blocks_override=64, enable_lora=True)
    prompt: Prompt = {"prompt": f"{PLACE}?", "multi_modal_data": {"image": CAT}}
    (output,) = llm.generate([prompt], GREEDY, lora_request=LoRARequest("today's", 1, str(adapter)))
    adapted = Oracle(oracle.folder, merged(oracle.model, adapter))
    assert list(output.outputs[0].token_ids) == answer(adapted, output, CAT) != answer(oracle, output, CAT)


def test_without_pillow(llm, monkeypatch):
    prompt = {"prompt": PLACE, "multi_modal_data": {"image": png(CAT)}}
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InvalidRequestError, match=r"needs Pillow, .*: pip install 'headrace\[images\]'"):
        llm.generate(prompt, GREEDY)


def test_addresses_are_not_fetched(llm):
    far = says({"type": "image_url", "image_url": {"url": "http://example.org/cat.png"}})
    with pytest.raises(InvalidRequestError, match="nothing is fetched from there: send it inline"):
        llm.chat(far, GREEDY)
    with pytest.raises(InvalidRequestError, match="no valid base64"):
        llm.chat(says({"type": "image_url", "image_url": {"url": "data:image/png;base64,&&"}}), GREEDY)
