"""`make test-hosts`: runs each recipe of `examples/hosts` with its framework in a separate environment."""

import subprocess
import sys

from apart import HERE, ROOT, environment, variables

HOSTS = ("flgo", "appfl", "nvflare")


def main() -> None:
    """Run the named recipes, or all recipes."""
    for host in sys.argv[1:] or HOSTS:
        python = environment(f"host-{host}")
        command = [python, HERE / f"with_{host}.py", ROOT / "examples" / "hosts" / f"{host}.py"]
        subprocess.run(command, env=variables(ROOT), check=True, timeout=600)


if __name__ == "__main__":
    main()
