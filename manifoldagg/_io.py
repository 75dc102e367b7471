"""Output files, which are written atomically, and figures without pyplot's global state."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from manifoldagg.errors import ArgumentError

__all__ = ["atomic_write", "check_matplotlib", "new_figure"]


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`, which replaces `path` if the block ends without an error.

    Whoever reads `path` sees what was there before or all that is new, after a crash as well; of a block that fails
    nothing stays.

    Raises:
        OSError: if nothing can be written there.

    Example:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "numbers.txt"
        ...     with atomic_write(path) as draft:
        ...         _ = draft.write_text("1 2 3")
        ...     path.read_text(), len(os.listdir(folder))
        ('1 2 3', 1)
    """
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as beside:
        draft = Path(beside) / path.name
        yield draft
        if draft.is_file():
            with draft.open("rb") as written:
                os.fsync(written.fileno())  # a name must not stand for half a file after a crash
        before = Path(beside) / f"{path.name}.before"
        try:
            if path.is_dir():
                os.replace(path, before)  # a folder cannot be put in the place of one that is not empty
            os.replace(draft, path)
        finally:
            if before.exists() and not path.exists():
                os.replace(before, path)


def check_matplotlib() -> None:
    """Raise early if matplotlib is missing.

    Raises:
        ArgumentError: saying what to install.
    """
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise ArgumentError("plots: plots require matplotlib: pip install 'manifoldagg[experiments]'") from None


def new_figure(width: float = 6.4, height: float = 4.8) -> Any:
    """Create a matplotlib figure, in inches, without a display and outside of pyplot's global state.

    Raises:
        ArgumentError: if matplotlib is missing.

    Example:
        >>> from matplotlib import pyplot
        >>> axes = new_figure().subplots()
        >>> pyplot.get_fignums()
        []
    """
    check_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=150, layout="constrained")
