"""What the wheel holds, what its parts import, and that the files around the code agree with it."""

import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import headrace

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
VERSION = PYPROJECT["project"]["version"]
FOLDERS = ("engine", "jobs", "kernels", "storage")
COMPILED = f"kernels/native/_native{sysconfig.get_config_var('EXT_SUFFIX')}"
NOT_IN_A_CLONE = (
    ".git",
    ".venv",
    ".headrace",
    # Where another worker's tests may be writing.
    ".hypothesis",
    "out",
    "build",
    "dist",
    "*.egg-info",
    "__pycache__",
    ".*_cache",
)


def run(*command: str | Path, cwd: str | Path = ROOT, env: dict[str, str] | None = None) -> str:
    """Run a command to its end and return what it printed; a failure shows its errors."""
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def run_python(code: str) -> str:
    return run(sys.executable, "-c", code, cwd="/")


def sources() -> set[str]:
    return {str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy that holds what a clone holds."""
    folder = tmp_path_factory.mktemp("wheel")
    clone = folder / "clone"
    shutil.copytree(ROOT, clone, symlinks=True, ignore=shutil.ignore_patterns(*NOT_IN_A_CLONE))
    if (clone / COMPILED).exists():
        # The installation has compiled it: what setuptools finds there it compiles again only where a source is newer.
        built = clone / f"build/lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}" / "headrace" / COMPILED
        built.parent.mkdir(parents=True)
        shutil.copy2(clone / COMPILED, built)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, clone)
    return next(folder.glob("*.whl"))


def test_every_folder_with_python_files_is_a_listed_package():
    folders = {str(Path(name).parent).replace("/", ".") for name in sources()}
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == {
        "headrace",
        *(f"headrace.{f}" for f in folders),
    }


def test_every_file_of_the_kernels_is_listed():
    """One that there is not has them compiled each time, and one that is not listed not when it changes."""
    [kernels] = PYPROJECT["tool"]["setuptools"]["ext-modules"]
    files = [str(path.relative_to(ROOT)) for path in (ROOT / "kernels/native/src").iterdir()]
    assert sorted(kernels["sources"]) == sorted(name for name in files if name.endswith(".cpp"))
    assert sorted(kernels["depends"]) == sorted(name for name in files if name.endswith(".h"))


def test_no_document_holds_the_marks_of_a_merge():
    """Nobody reads a long one through after it."""
    mark = re.compile("^(<{7} |>{7} |={7}$)", re.MULTILINE)
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    assert documents
    assert not [path.name for path in documents if mark.search(path.read_text())]


def test_the_files_that_comments_and_documents_name_are_there():
    """By their paths or the ends of these; a decision may name one of its day."""
    there = [str(path) for path in ROOT.rglob("*.py")]
    documents = [path for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")) if path.name != "decisions.md"]
    texts = {path: path.read_text() for path in (*documents, *map(ROOT.joinpath, sources()))}
    named = {(path.name, name) for path, text in texts.items() for name in re.findall(r"`([\w/]+\.py)`", text)}
    assert named
    assert not [each for each in named if not any(path.endswith(f"/{each[1]}") for path in there)]


def test_the_root_holds_no_python_file_but_the_package():
    assert [path.name for path in ROOT.glob("*.py")] == ["__init__.py"]


def test_the_checkers_see_each_folder():
    links = {path.name: path.resolve() for path in (ROOT / "typings/headrace").iterdir() if path.is_symlink()}
    assert links == {name: ROOT / name for name in (*FOLDERS, "__init__.py", "py.typed")}


def test_the_wheel_holds_the_packages_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    code = {name for name in names if name.endswith(".py")}
    assert code == {f"headrace/{name}" for name in {"__init__.py", *sources()}}
    assert "headrace/py.typed" in names
    assert {Path(name).parts[0] for name in names} == {"headrace"}
    # The compiled kernels are there where a compiler was.
    assert f"headrace/{COMPILED}" in names or not (ROOT / COMPILED).exists()
    assert {Path(name).suffix for name in names} <= {".py", ".pyi", ".typed", ".mako", ".so", ".proto", ".html"}


def test_the_wheel_installs_and_tells_its_version(wheel, tmp_path):
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--target", tmp_path, wheel)
    environment = {"PYTHONPATH": str(tmp_path), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    where = run(sys.executable, "-c", "import headrace; print(headrace.__file__)", env=environment, cwd=tmp_path)
    assert Path(where) == tmp_path / "headrace/__init__.py"
    assert VERSION in run(tmp_path / "bin/headrace", "--version", env=environment, cwd=tmp_path)


@pytest.mark.parametrize(
    "statement",
    [
        "import headrace",
        "from headrace.jobs.cli.app import command_line; command_line(['--help'])",
        "import headrace.jobs.planning.producer",
        "import headrace.jobs.client.client",
        "from headrace import BeamSearchParams, LoRARequest, SamplingParams, StructuredOutputsParams, TokensPrompt",
    ],
)
def test_producers_never_import_torch(statement):
    found = run_python(f"{statement}; import sys; print({{'torch', 'transformers', 'triton'}} & set(sys.modules))")
    assert found == "set()"


def test_whatever_the_package_offers_is_there():
    for name in headrace.__all__:
        value = getattr(headrace, name)
        assert name == "__version__" or value.__name__ == name
    assert {*headrace.__all__} <= {*dir(headrace)}


def test_engine_and_kernels_import_where_nothing_of_the_queue_is_installed():
    names = [Path(name).with_suffix("") for name in sorted(sources()) if name.startswith(("engine", "kernels"))]
    modules = [
        ".".join(("headrace", *name.parts)).removesuffix(".__init__")
        for name in names
        if not name.stem.startswith("triton")
    ]
    blocked = (
        "alembic",
        "celery",
        "kombu",
        "pyarrow",
        "pydantic",
        "redis",
        "rich",
        "sqlalchemy",
        "typer",
        "triton",
    )
    run_python(
        "import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({blocked}))\n"
        f"for module in {modules}: importlib.import_module(module)"
    )


def test_constraints_pin_every_dependency_to_an_accepted_version():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    project = PYPROJECT["project"]
    declared = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    for requirement in map(Requirement, declared):
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement


def test_the_changelog_and_the_image_name_this_version():
    assert yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["api"]["image"] == f"headrace:{VERSION}"
    assert re.search(rf"^## \[({re.escape(VERSION)}|Unreleased)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)


def interpolated(text: str) -> str:
    """What Compose makes of a text where none of its variables is set."""
    return re.sub(r"\$\{\w+:-(.*?)\}", r"\1", text)


class TestCompose:
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())
    services = compose["services"]

    def test_has_the_four_services(self):
        assert set(self.services) == {"redis", "postgres", "api", "worker"}

    @pytest.mark.parametrize("name", services)
    def test_each_service_restarts_and_is_checked(self, name):
        service = self.services[name]
        assert service["healthcheck"]["test"][0] in {"CMD", "CMD-SHELL"}
        assert service["restart"] == "unless-stopped"

    @pytest.mark.parametrize("name", ["api", "worker"])
    def test_ours_wait_for_healthy_servers_and_stay_while_those_restart(self, name):
        healthy = {"condition": "service_healthy"}
        assert self.services[name]["depends_on"] == {"redis": healthy, "postgres": healthy}

    @pytest.mark.parametrize("name", ["api", "worker"])
    def test_our_commands_know_their_options(self, name):
        from headrace.jobs.cli.app import command_line

        _, command, *words = self.services[name]["command"]
        ours: Any = typer.main.get_command(command_line([command]))
        context = ours.commands[command].make_context(command, list(map(interpolated, words)))
        assert context.params["dtype"] == "auto"

    def test_the_image_has_the_extras_that_are_used(self):
        extras = self.services["api"]["build"]["args"]["EXTRAS"]
        image = (ROOT / "deploy/Dockerfile").read_text()
        [default] = re.findall(r"^ARG EXTRAS=(.*)$", image, re.M)
        assert extras == f"${{EXTRAS:-{default}}}"
        assert set(default.split(",")) <= set(PYPROJECT["project"]["optional-dependencies"])
        ports = {port.rpartition(":")[2] for port in self.services["api"]["ports"]}
        assert ports == set(" ".join(re.findall(r"^EXPOSE (.*)$", image, re.M)).split())

    def test_named_volumes_are_declared(self):
        mounts = [mount for service in self.services.values() for mount in service["volumes"] if isinstance(mount, str)]
        assert {mount.partition(":")[0] for mount in mounts} == set(self.compose["volumes"])

    def test_the_worker_reserves_a_gpu(self):
        (device,) = self.services["worker"]["deploy"]["resources"]["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"]

    def test_without_a_gpu_only_the_build_and_the_reservation_differ(self):
        text = (ROOT / "compose.cpu.yaml").read_text()
        assert text.count("deploy: !reset null") == 1
        services = yaml.safe_load(text.replace("!reset null", "null"))["services"]
        build = services["api"]["build"]
        assert services == {"api": {"build": build}, "worker": {"build": build, "deploy": None}}
        extras = self.services["api"]["build"]["args"]["EXTRAS"]
        assert build["args"] == {"EXTRAS": extras.replace("gpu,", "")}

    def test_a_password_may_have_any_character(self):
        environment = self.services["worker"]["environment"]
        assert {name for name, text in environment.items() if "POSTGRES_PASSWORD" in text} == {"PGPASSWORD"}

    def test_our_settings_are_known(self):
        from headrace.jobs.settings import Settings

        given = self.services["worker"]["environment"]
        environment = {name: interpolated(text) for name, text in given.items()}
        settings = Settings.from_environment(environment)
        assert settings.redis_url == environment["HEADRACE_REDIS_URL"]
        assert settings.data_dir == Path("/data")
