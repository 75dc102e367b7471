"""`make test-peft`: the tests with the real PEFT, which skip where it is missing, in an environment of its own."""

import subprocess

from apart import ROOT, environment, variables


def main() -> None:
    """All of them."""
    command = [environment("peft"), "-m", "pytest", "tests/integrations/test_peft.py"]
    subprocess.run(command, cwd=ROOT, env=variables(ROOT), check=True, timeout=600)


if __name__ == "__main__":
    main()
