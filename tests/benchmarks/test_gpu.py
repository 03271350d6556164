"""The GPU's benchmark runs from end to end on a CPU, where nothing is installed that a bare GPU machine lacks."""

import fcntl
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the Triton kernels are for where it is installed")

FOLDER = Path(__file__).parents[2] / "benchmarks"
# In place of a machine without them: what else the project depends on, and the project as it is installed here.
BARE = """
import runpy, sys
class Missing:
    names = {"celery", "kombu", "redis", "pydantic", "sqlalchemy", "alembic", "pyarrow", "fastapi", "starlette",
             "uvicorn", "httpx2", "openai", "transformers", "llguidance", "typer", "rich", "grpc", "prometheus_client"}
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in cls.names:
            raise ModuleNotFoundError(f"{name} is not installed on a bare GPU machine", name=name)
sys.meta_path.insert(0, Missing)
sys.meta_path[:] = [each for each in sys.meta_path if "headrace" not in getattr(each, "__module__", "")]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_dry_run_on_a_bare_machine_has_every_goal_or_says_why_not(gpu_modules, tmp_path):
    file = tmp_path / "result.json"
    # What is there of a part that is run again goes, and what is not asked for stays.
    held = {"lines": [], "failure": "an earlier run's"}
    about = {"benchmark": "gpu", "gpu": "none (dry run)", "commit": "tested"}
    file.write_text(json.dumps({**about, "facts": {}, "parts": {"limits": held, "profile-large": held}}))
    parts = [
        "correct,limits,attention,large,small,fp8,uniform,sharing,linears,lora,states,mixtures,kernels",
        "flashinfer,transformers,vllm",
    ]
    every = ",".join([*parts, "profile-fp8,tiles,mixed,host,golden"])
    script = [FOLDER / "gpu.py", "--dry-run", "--only", every, "--commit", "tested", "--output", file]
    # Not in the project's folder, and without git.
    done = subprocess.run(
        [sys.executable, "-c", BARE, *script],
        cwd=tmp_path,
        env={"PYTHONPATH": str(FOLDER), "PATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == json.loads(file.read_text())
    failures = {name: part["failure"] for name, part in result["parts"].items() if "failure" in part}
    assert failures.pop("profile-large") == "an earlier run's"
    assert {name: "not installed" in reason or "No module" in reason for name, reason in failures.items()} == {
        "flashinfer": True,
        "transformers": True,
        "vllm": True,
    }
    lines = [line for part in result["parts"].values() for line in part["lines"]]
    measured = [line["number"] for line in lines if line["goal"] is not None and line["ratio"] is not None]
    assert {number: measured.count(number) for number in measured} == {1: 2, 2: 1, 3: 2, 4: 4, 5: 3, 7: 1}
    assert all(line["value"] >= 0 for line in lines)
    assert [len(result["parts"][part]["lines"]) for part in ("sharing", "tiles", "mixed")] == [2, 8, 8]
    # Of three kinds of steps, their phases and four lines more; of two workloads eight, and four phases of each of the
    # two kinds of steps; and one that compares.
    host = [line["name"] for line in result["parts"]["host"]["lines"]]
    assert len(host) == 3 * (len(gpu_modules("gpu_phases").PHASES) + 4) + 2 * (8 + 2 * 4) + 1
    for part, said in (("profile-fp8", "launches: together"), ("attention", "own tokens alone")):
        assert any(said in line["name"] for line in result["parts"][part]["lines"])
    assert "golden: sinks\n" in done.stdout
    assert "No module named 'flashinfer'" in done.stderr, "a failure's traceback is for whoever looks for its cause"


def test_a_run_that_is_stopped_ends_in_what_it_has_all_the_same(tmp_path):
    options = ("--dry-run", "--only", "limits,attention,linears", "--commit", "any")
    command = (sys.executable, str(FOLDER / "gpu.py"), *options)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("product of"):
                process.terminate()
                break
        *_, last = process.stdout
    assert process.returncode == 128 + signal.SIGTERM
    parts = json.loads(last)["parts"]
    assert [line["unit"] for line in parts["limits"]["lines"]] == ["TB/s", "TFLOP/s"]
    assert "linears" not in parts


def test_a_part_that_crashes_or_hangs_costs_no_other_its_figures(gpu_modules, tmp_path):
    parts, file = gpu_modules("gpu_parts"), tmp_path / "result.json"
    table = gpu_modules("gpu_table").Table(file, {"commit": "tested"})
    table.state("limits", {})
    measured = {"lines": [{"name": "a figure"}]}
    writes = (
        f"import json, sys; content = json.load(open({str(file)!r})); "
        f"content['parts'][sys.argv[1]] = {measured}; json.dump(content, open({str(file)!r}, 'w'))"
    )
    bodies = {"crashing": f"{writes}; import os; os.abort()", "hanging": "import signal; signal.pause()"}
    seconds = {"good": 30, "crashing": 30, "hanging": 0.1, "good too": 30, "slow": 1e6}

    def command_of(part: Any) -> list[str]:
        return waiting(bodies.get(part.name, writes), part.name)

    todo = [parts.Part(name, expected, print) for name, expected in seconds.items()]
    gpu_modules("gpu").run_apart(todo, table, 1000, command_of)
    found = json.loads(file.read_text())["parts"]
    assert found == {
        "good": measured,
        "crashing": {**measured, "failure": "its process ended with status -6"},
        "hanging": {"lines": [], "failure": "stopped after 0 s"},
        "good too": measured,
        "slow": {"lines": [], "failure": found["slow"]["failure"]},
    }
    assert "it takes about 1000000" in found["slow"]["failure"]


def waiting(body: str, *arguments: str) -> list[str]:
    """A process that is sent a line before it begins, and ends where none comes."""
    return [sys.executable, "-S", "-c", f"import sys; sys.stdin.readline() or sys.exit(1); {body}", *arguments]


def test_the_next_part_gets_ready_beside_one_and_begins_when_that_is_over(gpu_modules, tmp_path):
    parts, table = gpu_modules("gpu_parts"), gpu_modules("gpu_table").Table(None, {})
    log, ready = tmp_path / "log", tmp_path / "ready"
    os.mkfifo(ready)
    say = "open(sys.argv[1], 'a').write(sys.argv[3])"
    # The first is not done before the second is there.
    bodies = {"first": f"open(sys.argv[2]).read(); {say}", "second": say}
    getting_ready = {"first": "", "second": f"open({str(ready)!r}, 'w').close(); "}

    def command_of(part: Any) -> list[str]:
        *python, body = waiting(bodies[part.name])
        return [*python, f"import sys; {getting_ready[part.name]}{body}", str(log), str(ready), part.name]

    packages = {"first": None, "not here": "no_such", "second": None}
    todo = [parts.Part(name, 30, print, package=package) for name, package in packages.items()]
    gpu_modules("gpu").run_apart(todo, table, 1000, command_of)
    assert log.read_text() == "firstsecond"
    assert table.failures == {"not here": "no_such is not installed here"}


def test_what_a_part_has_started_ends_with_it(gpu_modules, tmp_path):
    """Of a peer that goes on to use the GPU, all later figures would be worth nothing."""
    parts, table = gpu_modules("gpu_parts"), gpu_modules("gpu_table").Table(None, {})
    lock, asked = tmp_path / "held", tmp_path / "asked"
    lock.touch()
    holds = "import fcntl, signal, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX); print(end='x', flush=True)"
    holds += "; signal.pause()"
    starts = "; ".join(
        (
            "import signal, subprocess",
            f"signal.signal(signal.SIGUSR1, lambda *_: open({str(asked)!r}, 'w').close())",
            f"command = [sys.executable, '-S', '-c', {holds!r}, {str(lock)!r}]",
            "subprocess.Popen(command, stdout=subprocess.PIPE).stdout.read(1)",
            "signal.pause()",
            "signal.pause()",
        )
    )
    gpu_modules("gpu").run_apart([parts.Part("hanging", 1, print)], table, 1000, lambda part: waiting(starts))
    assert "stopped after" in table.failures["hanging"]
    assert asked.exists(), "it was not asked where it hangs"
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def test_all_goals_have_a_figure_in_one_run_and_what_has_none_waits(gpu_modules, monkeypatch):
    parts = gpu_modules("gpu_parts")
    default = [part for part in parts.parts_of(is_dry=False) if part.name not in parts.EXTRAS]
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    assert sum(part.seconds for part in default if part.goals) <= gpu_modules("gpu")._arguments().seconds <= 470
    assert {goal for part in default for goal in part.goals} == set(range(1, 8))
    assert [bool(part.goals) for part in default] == sorted((bool(part.goals) for part in default), reverse=True)


def test_a_part_that_takes_too_long_leaves_the_later_goals_their_time(gpu_modules, tmp_path, monkeypatch):
    parts, main = gpu_modules("gpu_parts"), gpu_modules("gpu")
    table, given = gpu_modules("gpu_table").Table(None, {}), dict[str, float]()

    class Recording(main.Children):  # type: ignore[misc, name-defined]
        def run(self, part: Any, seconds: float, following: Any) -> None:
            given[part.name] = seconds

    monkeypatch.setattr(main, "Children", Recording)
    todo = [parts.Part(name, 50, print, goals) for name, goals in (("a", (1,)), ("b", (2,)), ("c", (3,)), ("d", ()))]
    for seconds in (100, 190, 1000):
        main.run_apart(todo, table, seconds, lambda part: [])
        assert given["a"] == pytest.approx({100: 75, 190: 90, 1000: 150}[seconds], abs=1)


def test_what_there_is_no_time_to_measure_again_stands(gpu_modules, tmp_path):
    tables, file = gpu_modules("gpu_table"), tmp_path / "result.json"
    table = tables.Table(file, {"commit": "tested"})
    table.run("slow", lambda: table.add(tables.Line("a figure", 1.0, "ms")))
    before = json.loads(file.read_text())["parts"]
    gpu_modules("gpu").run_apart([gpu_modules("gpu_parts").Part("slow", 1e6, print)], table, 10, lambda part: [])
    assert json.loads(file.read_text())["parts"] == before
    assert "failure" not in before["slow"]


def test_figures_of_another_gpu_or_commit_are_not_gone_on_with(gpu_modules, tmp_path):
    tables = gpu_modules("gpu_table")
    file = tmp_path / "result.json"
    tables.Table(file, {"commit": "one"}).state("limits", {"found": 1})
    assert tables.Table(file, {"commit": "one"}).fact("limits") == {"found": 1}
    assert tables.Table(file, {"commit": "two"}).fact("limits") is None


def test_what_fails_in_a_part_is_kept_beside_the_lines_before_it(gpu_modules, tmp_path):
    tables = gpu_modules("gpu_table")
    file = tmp_path / "result.json"
    table = tables.Table(file, {"commit": "tested"})

    def measure() -> None:
        table.add(tables.Line("a figure", 1.0, "ms"))
        held = json.loads(file.read_text())["parts"]["part"]["lines"]
        assert [line["name"] for line in held] == ["a figure"]
        raise RuntimeError("out of\nmemory")

    table.run("part", measure)
    part = json.loads(file.read_text())["parts"]["part"]
    assert part["failure"] == "RuntimeError: out of memory"
    assert len(part["lines"]) == 1


def test_the_readme_table_has_a_row_a_goal_of_the_parts_measured_last(gpu_modules):
    report, line = gpu_modules("gpu_report"), gpu_modules("gpu_table").Line
    about = {"gpu": "NVIDIA H200", "torch": "2.11.0", "facts": {}}

    def content(commit: str = "abc", **parts: Any) -> dict[str, Any]:
        return {**about, "commit": commit, "parts": parts}

    def measured(*lines: Any) -> dict[str, Any]:
        return {"lines": [asdict(each) for each in lines]}

    limits = measured(line("bytes copied", 4.3, "TB/s"))
    attention = measured(line("decode: plain", 3.0, "ms"), line("  shared: as fast", 0.5, "ms", 6.0, 4.0, 1))
    host = measured(line("host", 200.0, "us", 1.33, 1.0, 5))
    failed = {"lines": [], "failure": "out of memory"}
    first = content(limits=limits, attention=attention, small=failed)
    merged = report.merged([first, content("def", attention=failed, small=host, vllm=failed)])
    # Merged once more, each still says where it was measured.
    merged = report.merged([merged, content("def")])
    assert [merged["parts"][name]["commit"] for name in ("limits", "attention", "small")] == ["abc", "abc", "def"]
    assert report.markdown(merged) == [
        "Measured on NVIDIA H200, 2.11.0, abc and def. bytes copied 4.3 TB/s.",
        "",
        "| goal | what | measured | of its limit or rival | wanted | met |",
        "| --- | --- | --- | --- | --- | --- |",
        "| 1 | decode: shared: as fast | 0.5 ms | 6.00 | ≥ 4 | yes |",
        "| 5 | host | 200 us | 1.33 | ≤ 1 | **no** |",
        "",
        "Not measured:",
        "",
        "- vllm: out of memory",
    ]
    other = {**content(small=host), "gpu": "NVIDIA H100 80GB HBM3"}
    both = report.by_gpu([content(small=failed), other, content(small=host)])
    assert {gpu: each["parts"] for gpu, each in both.items()} == {
        "NVIDIA H200": {"small": {"commit": "abc", **host}},
        "NVIDIA H100 80GB HBM3": {"small": {"commit": "abc", **host}},
    }


def test_files_of_two_gpus_are_two_tables_and_not_one_file(gpu_modules, tmp_path):
    about = {"torch": "2.11.0", "commit": "abc", "facts": {}, "parts": {}}
    files = [tmp_path / "h100.json", tmp_path / "h200.json"]
    for file in files:
        file.write_text(json.dumps({"gpu": f"NVIDIA {file.stem.upper()}", **about}))
    command = [sys.executable, FOLDER / "gpu_report.py", *files]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [line for line in done.stdout.splitlines() if "Measured" in line] == [
        "Measured on NVIDIA H100, 2.11.0, abc. .",
        "Measured on NVIDIA H200, 2.11.0, abc. .",
    ]
    refused = subprocess.run([*command, "--output", tmp_path / "one.json"], capture_output=True, text=True, check=False)
    assert "--output: one file is about one GPU, and these are of NVIDIA H100, NVIDIA H200" in refused.stderr


@pytest.mark.parametrize(
    ("gpu", "name"), [("NVIDIA H100 80GB HBM3", "h100-gpu.json"), ("NVIDIA H200", "h200-gpu.json")]
)
def test_results_are_named_after_the_gpu(gpu_modules, gpu, name):
    assert gpu_modules("gpu_device").results_name(gpu) == name


@pytest.fixture
def gpu_modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    from importlib import import_module

    return import_module


def test_a_figure_is_of_what_was_checked_before(gpu_modules, monkeypatch):
    """Other numbers of rows have other tiles."""
    sizes, mixture = gpu_modules("gpu_kernels").DRY, gpu_modules("gpu_mixtures").DRY
    linears, lora, mixtures = (gpu_modules(f"gpu_{name}") for name in ("linears", "lora", "mixtures"))
    for module, check, measured in (
        (linears, lambda: linears.check_linear(sizes), sizes.linear_rows),
        (lora, lambda: lora.check_lora(sizes), sizes.linear_rows),
        (mixtures, lambda: mixtures.check_mixtures(sizes, mixture), mixture.num_tokens),
    ):
        checked = set[int]()
        monkeypatch.setattr(module, "assert_near", lambda found, *_, seen=checked: seen.add(len(found)))
        check()
        assert {*measured} < checked


def test_numbers_that_are_small_are_compared_as_closely(gpu_modules):
    assert_near = gpu_modules("gpu_kernels").assert_near
    # A mean of 4,096 values.
    expected = torch.randn(3, 2, 64) / 64
    assert_near(expected * 1.01, expected, 2e-2)
    torch.testing.assert_close(torch.zeros_like(expected), expected, rtol=0, atol=0.1)
    for wrong in (torch.zeros_like(expected), expected * torch.tensor([1, torch.nan])[:, None]):
        with pytest.raises(AssertionError, match=r"may be by 0\.02"):
            assert_near(wrong, expected, 2e-2)


def test_the_ceilings_are_those_that_the_goals_were_set_by(gpu_modules):
    """Output tokens and labels a second on an H200, worked out by hand before there was a line of code."""
    limits = gpu_modules("gpu_kernels").Limits(4.3e12, 790e12)
    configs, least_seconds = gpu_modules("gpu_engine").CONFIGS, gpu_modules("gpu_ceilings").least_seconds
    for model, tokens, labels in (("llama-3-8b", 22_700, 384), ("M2", 339_000, 6_360)):
        assert 256 * 128 / least_seconds(configs[model], 256, 2048, 128, 128, limits) == pytest.approx(tokens, rel=0.01)
        assert 1024 / least_seconds(configs[model], 1024, 2048, 128, 8, limits) == pytest.approx(labels, rel=0.01)


def test_idle_time_is_what_no_interval_covers(gpu_modules):
    idle_share = gpu_modules("gpu_steps").idle_share
    intervals = [(0.0, 10.0), (2.0, 4.0), (12.0, 20.0), (60.0, 100.0)]
    assert idle_share(intervals, 0.0) == pytest.approx(0.42)
    assert idle_share(intervals, 5.0) == pytest.approx(0.40)


def test_in_each_step_that_is_timed_all_decode_however_many_their_prompts_take(gpu_modules, monkeypatch):
    steps, engine = gpu_modules("gpu_steps"), gpu_modules("gpu_engine")
    # Of 40 tokens, and a step has room for 64.
    work = engine.Workload.shared("gate", 12, 24, 16, 4 + steps.SPARE_TOKENS)
    llm = engine.load_for("gate", torch.device("cpu"), [work], async_scheduling=True, enable_prefix_caching=False)
    brought, step, drain = [], llm.engine.step, steps.drain

    def noted_step():
        before = llm.engine.num_generated_tokens
        events = step()
        brought.append(llm.engine.num_generated_tokens - before)
        return events

    def noted_drain(engine):
        monkeypatch.undo()
        drain(engine)

    monkeypatch.setattr(llm.engine, "step", noted_step)
    monkeypatch.setattr(steps, "drain", noted_drain)
    steps.step_times(llm, work.prompts, 4)
    assert len(brought) > 11
    assert brought[-4:] == [12, 12, 12, 12]


def test_the_phases_of_steps_have_nothing_in_common_and_the_engine_is_as_before(gpu_modules):
    engine, host, phases = (gpu_modules(f"gpu_{name}") for name in ("engine", "host", "phases"))
    work = engine.Workload.shared("gate", 3, 24, 16, 4 + gpu_modules("gpu_steps").SPARE_TOKENS)
    llm = engine.load_for("gate", torch.device("cpu"), [work], async_scheduling=True)
    functions = [vars(owner)[name] for owner, name, _ in phases.PHASES]
    steps = host.decode_steps(llm, work.prompts, 4)
    assert [vars(owner)[name] for owner, name, _ in phases.PHASES] == functions
    assert "step" not in vars(llm.engine)
    titles = [title for _, _, title in phases.PHASES]
    assert len(set(titles)) == len(titles)
    assert [step.is_decode for step in steps] == [True] * 4
    for step in steps:
        assert 0 < step.own(*titles) <= step.seconds
        assert [call.title for call in step.calls].count("launching the model without a graph") == 1


def test_a_phase_whose_function_has_another_name_is_refused(gpu_modules, monkeypatch):
    phases, engine = gpu_modules("gpu_phases"), gpu_modules("gpu_engine")
    llm = engine.load_for("gate", torch.device("cpu"), [engine.Workload.shared("gate", 1, 8, 8, 1)])
    owner, name, _ = phases.PHASES[0]
    held = vars(owner)[name]
    monkeypatch.setattr(phases, "PHASES", (phases.PHASES[0], (owner, "renamed", "what is gone")))
    with pytest.raises(KeyError, match="renamed"), phases.watched(llm.engine):
        pass
    assert vars(owner)[name] is held


def test_the_periods_of_a_workload_are_all_of_it(gpu_modules, monkeypatch):
    engine, host, phases = (gpu_modules(f"gpu_{name}") for name in ("engine", "host", "phases"))
    # Of 40 tokens, and a step has room for 64.
    work = engine.Workload.shared("gate", 5, 24, 16, 6)
    llm = engine.load_for("gate", torch.device("cpu"), [work], async_scheduling=True, enable_prefix_caching=False)
    # A clock that goes on by one whenever somebody looks: nothing depends on how fast the machine is.
    ticks = count()
    for module in (host, phases):
        monkeypatch.setattr(module, "perf_counter", lambda: float(next(ticks)))
    periods, longest = host.periods(llm, work)
    assert list(periods) == [
        "until the first launch",
        *("4 steps with prompts: host", "4 steps with prompts: waiting"),
        *("5 decode steps: host", "5 decode steps: waiting"),
        *("after the last launch: host", "after the last launch: waiting"),
    ]
    assert min(periods.values()) > 0
    # All but a tick between the end of each of the eight steps that launch something and the begin of the next one.
    assert sum(periods.values()) == next(ticks) - 1 - 7
    for kind, number in (("steps with prompts", 4), ("decode steps", 5)):
        seconds = [value for title, value in longest.items() if title.startswith(f"{kind}, of the host: ")]
        assert len(seconds) == 4
        assert seconds == sorted(seconds, reverse=True)
        assert seconds[-1] > 0
        assert sum(seconds) < periods[f"{number} {kind}: host"]


def test_a_profiler_that_sees_nothing_says_what_it_needs(gpu_modules):
    steps = gpu_modules("gpu_steps")
    on_host = SimpleNamespace(
        name="a call", device_type=steps.DeviceType.CPU, time_range=SimpleNamespace(start=0, end=1)
    )
    with pytest.raises(steps.ProfilerError, match="CUPTI"):
        steps.StepProfile.from_events([on_host], steps.DeviceType.CUDA, 4)
    assert steps.StepProfile.from_events([on_host], steps.DeviceType.CPU, 4).idle_share == 0


def test_a_peer_that_is_not_done_in_its_time_is_no_faster_than_that(gpu_modules):
    pytest.importorskip("transformers")
    peers, engine = gpu_modules("gpu_peers"), gpu_modules("gpu_engine")
    work = engine.Workload.uniform("gate", 3, 100, 200)
    folder, seconds = engine.config_folder("gate"), peers.PeerSeconds(warm_up=0.1, timed=0.1, whole=300)
    rate = peers.peer_rate("transformers", folder, work, "cpu", seconds)
    assert rate.is_most
    assert rate.tokens_per_second < work.num_output_tokens / 0.1


def test_a_workload_to_warm_up_with_has_the_same_lengths_and_no_token_in_common(gpu_modules):
    workload = gpu_modules("gpu_engine").Workload
    for work in (workload.shared("gate", 4, 9, 3, 2), workload.uniform("gate", 5, 2, 30)):
        other = work.with_other_tokens()
        assert [len(prompt) for prompt in other.prompts] == [len(prompt) for prompt in work.prompts]
        assert other.max_tokens == work.max_tokens
        pairs = [
            pair for prompts in zip(work.prompts, other.prompts, strict=True) for pair in zip(*prompts, strict=True)
        ]
        assert all(mine != others >= 0 for mine, others in pairs)
