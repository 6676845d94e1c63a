"""A C++ project builds against the installed package: the one in examples/cpp."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import pagedlora
from pagedlora import _core

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "cpp"


@pytest.fixture(scope="module")
def prefix() -> str:
    try:
        return pagedlora.cmake_prefix_path()
    except FileNotFoundError:
        pytest.skip("pagedlora runs from its source tree: it is not installed")


def configure(source: Path, build: Path, prefix: str) -> subprocess.CompletedProcess[str]:
    command = ["cmake", "-S", source, "-B", build, "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={prefix}"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def build_program(build: Path, name: str) -> Path:
    result = subprocess.run(
        ["cmake", "--build", build, "--target", name], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return build / name


def run(program: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def build(prefix: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("example")
    result = configure(EXAMPLE, directory, prefix)
    assert result.returncode == 0, result.stdout + result.stderr
    return directory


def test_the_example_gets_the_right_answers_from_the_core_component(build: Path) -> None:
    result = run(build_program(build, "three_adapters"))
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines() == [
        "adapter 1: 128, expected 128",
        "adapter 2: 256, expected 256",
        "adapter 3: 384, expected 384",
    ]


def test_the_example_links_the_cuda_component_where_the_build_has_it(build: Path) -> None:
    support = _core.gpu_support()
    if support["state"] == "built without CUDA":
        targets = subprocess.run(
            ["cmake", "--build", build, "--target", "help"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert "gpu_support" not in targets
        return
    result = run(build_program(build, "gpu_support"))
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[0] == support["state"]


HEADERS_PROJECT = """\
cmake_minimum_required(VERSION 3.26)
project(headers LANGUAGES CXX)
find_package(pagedlora REQUIRED)
file(GLOB sources "${CMAKE_CURRENT_SOURCE_DIR}/*.cc")
add_library(headers OBJECT ${sources})
target_compile_options(headers PRIVATE -fsyntax-only -Wall -Wextra -Wpedantic -Werror)
target_link_libraries(headers PRIVATE pagedlora::core)
if(TARGET pagedlora::cuda)
  target_link_libraries(headers PRIVATE pagedlora::cuda)
endif()
"""


def test_every_public_header_can_be_included_alone(prefix: str, tmp_path: Path) -> None:
    include = Path(prefix) / "include"
    headers = sorted(str(path.relative_to(include)) for path in include.rglob("*.h"))
    assert len(headers) > 20
    for number, header in enumerate(headers):
        (tmp_path / f"header_{number}.cc").write_text(f"#include <{header}>\n")
    (tmp_path / "CMakeLists.txt").write_text(HEADERS_PROJECT)
    configured = configure(tmp_path, tmp_path / "build", prefix)
    assert configured.returncode == 0, configured.stdout + configured.stderr
    built = subprocess.run(
        ["cmake", "--build", tmp_path / "build"], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr


def test_an_unknown_component_is_named(prefix: str, tmp_path: Path) -> None:
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.26)\nproject(asks LANGUAGES CXX)\n"
        "find_package(pagedlora REQUIRED COMPONENTS core warp_drive)\n"
    )
    result = configure(tmp_path, tmp_path / "build", prefix)
    assert result.returncode != 0
    assert "it has no component warp_drive: there are core and cuda" in " ".join(
        result.stderr.split()
    )
