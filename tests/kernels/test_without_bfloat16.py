"""A processor with AVX-512 and VNNI that knows no bfloat16, as Intel's were from Cascade Lake to Ice Lake.

It is told from one that does by what the compiled kernels say the processor has; whether its instructions are all that
they then use, their machine code tells.
"""

import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.engine.errors import ConfigError
from headrace.kernels.linear import Linear, supports_grouped, supports_int8
from headrace.kernels.linear.float32 import takes_float32
from headrace.kernels.linear.packed import PackedProduct, takes_packed
from headrace.kernels.native import (
    InstructionSet,
    _library_file,
    has_avx512,
    instruction_set,
    native_library,
    runs_native,
)

CPU = torch.device("cpu")
MODEL = Path(__file__).parents[2] / "examples" / "tickets" / "model"
BFLOAT16_INSTRUCTIONS = re.compile(r"\bv(dpbf16ps|cvtneps2bf16|cvtne2ps2bf16)")
# Of functions that are called where there is none of these; bfloat16 is `unsigned short` there.
OF_FLOAT32 = re.compile(r"float32|Float32|\b(int8|grouped)::.*\bfloat\b|\bdelta::.*<float\b")

pytestmark = pytest.mark.skipif(not has_avx512(), reason="needs AVX-512")


@pytest.fixture
def _without_bfloat16(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(native_library(), "headrace_instruction_set", lambda: int(InstructionSet.AVX512))
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    instruction_set.cache_clear()
    yield
    monkeypatch.undo()
    instruction_set.cache_clear()


@pytest.mark.usefixtures("_without_bfloat16")
def test_computes_in_float32_with_what_it_has():
    assert instruction_set() is InstructionSet.AVX512
    narrow, wide = torch.zeros(32, 64, dtype=torch.bfloat16), torch.zeros(32, 64)
    assert (runs_native(wide), runs_native(narrow)) == (True, False)
    assert (takes_packed(wide), takes_packed(narrow), takes_float32(wide)) == (True, False, False)
    for supports in (supports_int8, supports_grouped):
        assert (supports(torch.float32, CPU), supports(torch.bfloat16, CPU)) == (True, False)
    linear = Linear(wide, None)
    linear.prepack()
    assert isinstance(linear._product, PackedProduct)


@pytest.mark.usefixtures("_without_bfloat16")
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_answers_as_a_processor_with_bfloat16_does_in_float32(quantization, request):
    """The arithmetic of both is the same."""
    prompts = ["I was charged twice.", "Where is my parcel?", "My parcel should have been here on Monday."]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

    def answers() -> list[list[int]]:
        llm = LLM(MODEL, dtype="float32", quantization=quantization, seed=0)
        return [list(result.outputs[0].token_ids) for result in llm.generate(prompts, params, use_tqdm=False)]

    without = answers()
    request.getfixturevalue("monkeypatch").undo()
    instruction_set.cache_clear()
    assert instruction_set() >= InstructionSet.AVX512
    assert without == answers()


@pytest.mark.usefixtures("_without_bfloat16")
def test_int8_in_bfloat16_is_refused():
    with pytest.raises(ConfigError, match="needs the compiled kernels and a CPU"):
        LLM(MODEL, dtype="bfloat16", quantization="int8")


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs a disassembler")
def test_no_instruction_of_bfloat16_is_in_what_it_calls():
    file = _library_file()
    assert file is not None
    listing = subprocess.run(
        ["objdump", "--disassemble", "--demangle", "--no-show-raw-insn", file],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    used: dict[str, set[str]] = defaultdict(set)
    name = ""
    for line in listing.splitlines():
        if (heading := re.fullmatch(r"[0-9a-f]+ <(.*)>:", line)) is not None:
            name = heading[1]
            used[name]
        elif (found := BFLOAT16_INSTRUCTIONS.search(line)) is not None:
            used[name].add(found[0])
    of_float32 = {each: instructions for each, instructions in used.items() if OF_FLOAT32.search(each)}
    assert len(of_float32) > 100
    assert {each: instructions for each, instructions in of_float32.items() if instructions} == {}
    # Otherwise they would be looked for by other names.
    assert any(used.values())
