"""The commands print plainly and exit with 1 when something is wrong."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tests.support.adapters import write_random_adapter
from tests.support.tiny_models import build_tiny_model
from typer.testing import CliRunner

from pagedlora import LoraModelConfig, _core, doctor
from pagedlora.cli import app

runner = CliRunner()


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def fake_module(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: object) -> None:
    """Puts a module of that name with those attributes in place of the real one."""
    module = ModuleType(name)
    for key, value in attributes.items():
        setattr(module, key, value)
    monkeypatch.setitem(sys.modules, name, module)


def test_help_lists_the_commands() -> None:
    result = runner.invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "Thousands of LoRA adapters over one base model." in result.output
    for command in ("doctor", "probe", "demo", "generate"):
        assert command in result.output


def test_doctor_shows_versions_machine_and_native_part(monkeypatch: pytest.MonkeyPatch) -> None:
    report = doctor.Diagnosis(
        {"Versions": {"torch": "2.0"}, "Native part": {"cuda": "built without CUDA"}}
    )
    monkeypatch.setattr(doctor, "diagnose", lambda: report)
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 0
    assert "torch" in result.output
    assert "built without CUDA" in result.output
    assert "No problem found" in result.output


def test_doctor_fails_with_the_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "diagnose", lambda: doctor.Diagnosis({}, ["torch is missing"]))
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "problem: torch is missing" in result.output


def test_the_diagnosis_names_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_PACKAGES", ("numpy", "no-such-package"))
    report = doctor.diagnose()
    assert "no-such-package is not installed: pip install no-such-package" in report.problems
    assert report.sections["Versions"]["no-such-package"] == "not installed"
    assert "available of" in report.sections["Machine"]["memory"]
    assert int(report.sections["Machine"]["CPUs usable"]) >= 1


@pytest.fixture
def source_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is installed under the name of the package."""
    real = importlib.metadata.version

    def version(package: str) -> str:
        if package == "pagedlora":
            raise importlib.metadata.PackageNotFoundError(package)
        return real(package)

    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.mark.usefixtures("source_tree")
def test_a_source_tree_that_is_built_is_no_problem() -> None:
    report = doctor.diagnose()
    assert not report.problems
    shown = report.sections["Versions"]["pagedlora"]
    assert shown.startswith(f"{_core.build_info()['version']} (a source tree, not installed: ")
    assert runner.invoke(app, ["--version"]).output == f"pagedlora {shown}\n"


def test_the_version_is_the_installed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "1.2.3")
    result = runner.invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, "pagedlora 1.2.3\n")


NO_GPU = {"num_devices": 0, "driver_version": 0, "runtime_version": 13000}


@pytest.fixture
def fake_core(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Stands where the native part is; told by the tests what to say."""
    core = ModuleType("pagedlora._core")
    core.build_info = dict  # type: ignore[attr-defined]
    core.gpu_support = lambda: NO_GPU | {"state": "no device", "detail": ""}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pagedlora._core", core)
    monkeypatch.setattr("pagedlora._core", core, raising=False)
    return core


def test_the_diagnosis_knows_the_build(fake_core: ModuleType) -> None:
    fake_core.build_info = lambda: {"version": "0.1.0", "best_isa": "avx512"}  # type: ignore[attr-defined]
    native = doctor.diagnose().sections["Native part"]
    assert native == {"version": "0.1.0", "best_isa": "avx512"}


@pytest.mark.parametrize(
    ("said", "facts"),
    [
        (
            NO_GPU | {"state": "no driver", "detail": "install one"},
            {"state": "no driver", "detail": "install one", "CUDA of the runtime": "13.0"},
        ),
        (
            NO_GPU | {"state": "built without CUDA", "detail": "build it", "runtime_version": 0},
            {"state": "built without CUDA", "detail": "build it"},
        ),
        (
            NO_GPU
            | {"state": "available", "detail": "", "num_devices": 2, "driver_version": 13010},
            {
                "state": "available",
                "devices": "2",
                "CUDA of the driver": "13.1",
                "CUDA of the runtime": "13.0",
            },
        ),
    ],
)
def test_the_diagnosis_says_why_there_is_no_gpu(
    fake_core: ModuleType, said: dict[str, object], facts: dict[str, str]
) -> None:
    fake_core.gpu_support = lambda: said  # type: ignore[attr-defined]
    report = doctor.diagnose()
    assert report.sections["GPU"] == facts
    assert not any("GPU" in problem for problem in report.problems)


def test_a_machine_without_a_gpu_is_told_from_a_build_without_cuda() -> None:
    support = _core.gpu_support()
    if support["state"] == "built without CUDA":
        assert support["runtime_version"] == 0
    else:
        assert support["runtime_version"] >= 12000
    assert (support["state"] == "available") == (support["num_devices"] > 0)
    assert bool(support["detail"]) == (support["state"] != "available")


def test_probe_of_the_current_directory_checks_the_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = build_tiny_model("llama")
    model.save_pretrained(tmp_path / "model")
    config = LoraModelConfig.from_module(model)
    monkeypatch.chdir(write_random_adapter(tmp_path / "adapter", config, rank=2, seed=1))
    result = runner.invoke(app, ["probe", ".", "--model", str(tmp_path / "model")])
    assert result.exit_code == 0, result.output
    assert result.output.startswith("adapter  .")


@pytest.mark.parametrize("content", [None, "{}", "not json"])
def test_a_model_that_cannot_be_loaded_is_one_line(
    content: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = LoraModelConfig.from_module(build_tiny_model("llama"))
    adapter = write_random_adapter(tmp_path / "adapter", config, rank=2, seed=1)
    model = tmp_path / "model"
    model.mkdir()
    if content is not None:
        (model / "config.json").write_text(content)
    result = runner.invoke(app, ["probe", str(adapter), "--model", str(model)])
    assert result.exit_code == 1
    assert result.output.startswith(f"error: model '{model}' cannot be loaded: ")
    assert len(result.output.strip().splitlines()) == 1


@pytest.mark.parametrize(("arguments", "tiny"), [([], False), (["--tiny"], True)])
def test_demo_exits_with_what_the_demo_says(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], tiny: bool
) -> None:
    seen: list[bool] = []

    def run_demo(*, tiny: bool, **options: object) -> int:
        seen.append(tiny)
        assert options == {"model": None, "adapters": None, "seed": 0}
        return 1

    fake_module(monkeypatch, "pagedlora.demo.run", run_demo=run_demo)
    assert runner.invoke(app, ["demo", *arguments]).exit_code == 1
    assert seen == [tiny]
