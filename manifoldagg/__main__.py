"""Entry point of `python -m manifoldagg` and of the command `manifoldagg`.

The module handles SIGINT (Ctrl-C) before it imports other modules, so Ctrl-C during these imports ends the process
without a traceback.
"""

import os

__all__ = ["main"]


def main() -> None:
    """Run the command line."""
    try:
        from manifoldagg._signals import exit_on_sigint

        exit_on_sigint()
    except KeyboardInterrupt:
        os.write(2, b"interrupted\n")
        os._exit(130)
    from manifoldagg.cli.app import main as command

    command()


if __name__ == "__main__":
    main()
