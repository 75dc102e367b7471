"""`make test-hosts`: each recipe of `examples/hosts` in the package that it is for, in an environment of its own."""

import subprocess
import sys

from apart import HERE, ROOT, environment, variables

HOSTS = ("flgo", "appfl", "nvflare")


def main() -> None:
    """Those that are named, or all."""
    for host in sys.argv[1:] or HOSTS:
        python = environment(f"host-{host}")
        command = [python, HERE / f"with_{host}.py", ROOT / "examples" / "hosts" / f"{host}.py"]
        subprocess.run(command, env=variables(ROOT), check=True, timeout=600)


if __name__ == "__main__":
    main()
