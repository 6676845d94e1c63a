"""Where C++ projects find the headers and libraries that come with this package."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def cmake_prefix_path() -> str:
    """The directory in `CMAKE_PREFIX_PATH` with which `find_package(pagedlora)` finds this package.

    `examples/cpp` shows its use. Projects that scikit-build-core builds beside this package need
    not set it.

    Raises:
        FileNotFoundError: The package runs from its source tree, without having been installed.
    """
    if not (_PACKAGE / "lib" / "cmake" / "pagedlora").is_dir():
        raise FileNotFoundError(
            f"{_PACKAGE} has no lib/cmake/pagedlora: it is a source tree; install the package"
        )
    return str(_PACKAGE)
