"""`make test-peft`: runs the tests that require PEFT in a separate environment."""

import subprocess

from apart import ROOT, environment, variables


def main() -> None:
    """Run the tests."""
    command = [environment("peft"), "-m", "pytest", "tests/integrations/test_peft.py"]
    subprocess.run(command, cwd=ROOT, env=variables(ROOT), check=True, timeout=600)


if __name__ == "__main__":
    main()
