"""Stages of a model compute one after the other what the whole model does, each with its own layers alone."""

from dataclasses import replace

import numpy
import pytest
import torch
from torch import Tensor

from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.checkpoints.model_size import kv_token_bytes, num_parameters, state_bytes, weight_bytes
from headrace.engine.config import EngineConfig
from headrace.engine.errors import ConfigError
from headrace.engine.execution.micro_batches import micro_batches, num_micro_batches
from headrace.engine.execution.model_runner import ModelRunner
from headrace.engine.sharding.ranks import ALONE, ProcessRanks, Ranks
from headrace.engine.sharding.stages import own_model, require_parallel, stage_layers, stage_model
from headrace.kernels.paged_attention import DecodeSeries, DecodeStep

from .batches import batch
from .sharing import BLOCK_SIZE, CPU, FROM_FILE, Way, assert_close, saved_logits, shared_logits, together
from .small_models import MODELS, QUANTIZED, WITH_STATES, write_model

FALCON = {
    "architectures": ["FalconForCausalLM"],
    "alibi": False,
    "new_decoder_architecture": True,
    "num_kv_heads": 4,
    "num_ln_in_parallel_attn": 2,
    "parallel_attn": True,
    "head_dim": 12,
}


@pytest.mark.parametrize("name", [*MODELS, "falcon"])
def test_of_every_family(name, tmp_path):
    """Three layers are two and one. Drawn: the same random weights. Then read: each its own."""
    fields = FALCON if name == "falcon" else {"name": name}
    config = ModelConfig.from_pretrained(write_model(tmp_path, num_hidden_layers=3, **fields))
    expected = saved_logits(config)
    torch.testing.assert_close(shared_logits(config, 1, num_stages=2), expected)
    torch.testing.assert_close(shared_logits(config, 1, FROM_FILE, num_stages=3), expected)


@pytest.mark.parametrize("name", WITH_STATES)
def test_of_layers_with_states(name, tmp_path):
    config = ModelConfig.from_pretrained(write_model(tmp_path, name))
    expected = saved_logits(config)
    assert_close(shared_logits(config, 1, num_stages=2), expected)
    assert_close(shared_logits(config, 2, FROM_FILE, num_stages=2), expected)
    stages = [stage_model(config, stage, 2) for stage in range(2)]
    assert sum(state_bytes(each, 2) for each in stages) == state_bytes(config, 2)
    assert all(2 * state_bytes(own_model(config, 0, 1, rank, 2), 2) == state_bytes(config, 2) for rank in range(2))


@pytest.mark.parametrize("name", ["gptq", "fp8-blocks"])
def test_of_quantised_checkpoints_whose_layers_are_shared_as_well(name, tmp_path):
    config = ModelConfig.from_pretrained(write_model(tmp_path, quantization_config=QUANTIZED[name], hidden_size=128))
    expected = saved_logits(config)
    torch.testing.assert_close(shared_logits(config, 2, num_stages=2), expected)
    torch.testing.assert_close(shared_logits(config, 2, FROM_FILE, num_stages=2), expected)


@pytest.mark.parametrize("name", ["qwen2", "llama-bias-tied", "gemma2", "qwen2-moe"])
def test_each_has_its_layers_and_the_ends_theirs(name, tmp_path):
    config = ModelConfig.from_pretrained(write_model(tmp_path, name, num_hidden_layers=5))
    parts = [stage_model(config, stage, 3) for stage in range(3)]
    ranks = [ProcessRanks((stage + 1) % 3, 1, CPU, "", lambda: None, 3) for stage in range(3)]
    models = [Way().load(config, each) for each in ranks]
    whole = Way().load(config)
    held = [sum(slot.destination.numel() for slot in each.weight_slots()) for each in (*models, whole)]
    # A matrix that is the embedding and the head is at both ends.
    twice = config.vocab_size * config.hidden_size if config.tie_word_embeddings else 0
    assert sum(held[:3]) == held[3] + twice == num_parameters(config) + twice
    assert held[:3] == [weight_bytes(part, 1) - norm_bytes(part) for part in parts]
    assert [len(each._layers) for each in models] == [2, 2, 1]
    assert sum(kv_token_bytes(part, 2) for part in parts) == kv_token_bytes(config, 2)
    names = [{slot.name for slot in each.weight_slots()} for each in (*models, whole)]
    assert names[0] | names[1] | names[2] == names[3]
    assert not names[0] & names[1]
    assert not names[1] & names[2]


def test_a_long_step_goes_through_in_parts(tmp_path):
    """Of which some begin and end within a sequence, and one sequence has a past."""
    model = ModelConfig.from_pretrained(write_model(tmp_path, num_hidden_layers=3))
    options = EngineConfig(load_format="dummy", num_gpu_blocks_override=24, block_size=BLOCK_SIZE, num_threads=1)
    past, step = (batch([24], [24])), batch([50, 90, 1, 70], [74, 90, 1, 70])

    handed_on = []

    def logits(ranks: Ranks) -> Tensor:
        runner = ModelRunner(model, options, ranks=ranks)
        runner.execute(past)
        computed = runner.execute(step)
        if ranks.stage < ranks.num_stages - 1:
            handed_on.append(len(computed))
        return computed

    assert [num_micro_batches(each, 2) for each in (past, step)] == [1, 3]
    assert num_micro_batches(step, 1) == 1
    parts = list(micro_batches(step, 3))
    assert [part.attention.query_lens for part in parts] == [[50, 20], [70], [1, 70]]
    assert [part.attention.context_lens for part in parts] == [[74, 20], [90], [1, 70]]
    torch.testing.assert_close(together(logits, tmp_path / "rendezvous", 1, 2), logits(ALONE))
    # The first stage joins nothing: the second one has been given each part.
    assert handed_on == [71]


def test_what_decodes_is_left_whole():
    """However many they are: a part would only read the weights once more."""
    many = batch([1] * 512, [1] * 512)
    assert num_micro_batches(many, 2) == 8
    step = DecodeStep(DecodeSeries(), 0, *numpy.empty((3, 0), dtype=numpy.int64))
    assert num_micro_batches(replace(many, attention=replace(many.attention, decode_step=step)), 2) == 1


def norm_bytes(part: ModelConfig) -> int:
    """Those of Gemma stay in float32, whatever the others have: three bytes more than one."""
    norms = 4 * part.num_hidden_layers + part.stage.is_last
    return 3 * norms * part.hidden_size if part.norm_offset else 0


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "expected"),
    [(4, 2, [2, 2]), (5, 2, [3, 2]), (7, 3, [3, 2, 2]), (5, 4, [2, 1, 1, 1]), (3, 3, [1, 1, 1])],
)
def test_the_last_stage_has_no_more_layers_than_any(num_layers, num_stages, expected):
    ranges = [stage_layers(num_layers, stage, num_stages) for stage in range(num_stages)]
    assert [end - start for start, end in ranges] == expected
    assert [layer for start, end in ranges for layer in range(start, end)] == list(range(num_layers))


def test_the_first_process_has_the_last_stage():
    ranks = [ProcessRanks(number, 2, CPU, "", lambda: None, 3) for number in range(6)]
    assert [(each.stage, each.rank) for each in ranks] == [(2, 0), (2, 1), (0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_share_of_a_stage(tmp_path):
    config = ModelConfig.from_pretrained(write_model(tmp_path, "qwen2-moe", num_hidden_layers=3, mlp_only_layers=[2]))
    share = own_model(config, 1, 2, 1, 2)
    assert share.moe is not None
    assert (share.num_hidden_layers, share.num_attention_heads, share.moe.sparse_layers) == (1, 4, (False,))
    assert (share.stage.first_layer, share.stage.is_first, share.stage.is_last) == (2, False, True)


def test_more_stages_than_layers_are_refused_with_both_numbers(tmp_path):
    config = ModelConfig.from_pretrained(write_model(tmp_path))
    with pytest.raises(ConfigError, match="pipeline_parallel_size=3 must be at most num_hidden_layers=2"):
        require_parallel(config, 1, 3)
    with pytest.raises(ConfigError, match="tensor_parallel_size=3 must divide num_attention_heads=8"):
        require_parallel(config, 3, 2)


def test_stages_of_layers_that_read_what_others_keep_are_refused(tmp_path):
    config = ModelConfig.from_pretrained(write_model(tmp_path, "gemma4-small"))
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size=2 is not supported for .* use tensor_parallel_size"):
        require_parallel(config, 1, 2)


def test_a_stage_without_states_or_without_keys_and_values_is_refused(tmp_path):
    config = ModelConfig.from_pretrained(write_model(tmp_path, "qwen3.5"))
    assert own_model(config, 0, 2, 0, 1).state_layers is not None
    with pytest.raises(
        ConfigError, match=r"pipeline_parallel_size=3 leaves a stage of .* without layers of both kinds"
    ):
        require_parallel(config, 1, 3)
    # An MLP by itself is of neither kind.
    nemotron = ModelConfig.from_pretrained(
        write_model(tmp_path / "nemotron", "nemotron-h", hybrid_override_pattern="M*M-")
    )
    with pytest.raises(ConfigError, match="pipeline_parallel_size=2 leaves a stage of"):
        require_parallel(nemotron, 1, 2)


@pytest.mark.parametrize(
    "options",
    [
        {"speculative_config": {"method": "draft_model", "model": "draft"}},
        {"speculative_config": {"method": "medusa", "model": "heads"}},
    ],
)
def test_what_does_not_go_with_it_is_refused_by_both_names(options):
    with pytest.raises(ConfigError, match=rf"{next(iter(options))}.* pipeline_parallel_size=2 .*leave one of them out"):
        EngineConfig(pipeline_parallel_size=2, **options)
    with pytest.raises(ConfigError, match="tensor_parallel_size=4 and pipeline_parallel_size=2"):
        EngineConfig(tensor_parallel_size=4, pipeline_parallel_size=2, **options)
