"""Tests of the command `manifoldagg doctor`, which reports what works on this machine."""

import pytest

from manifoldagg.cli import doctor


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        (set(), None),
        ({"ray"}, None),
        ({"flwr"}, "flwr: a simulation needs Ray, which is not installed; run pip install 'flwr[simulation]'"),
        ({"flwr", "ray"}, "flwr: simulation works, because Ray is installed"),
    ],
    ids=["neither", "only Ray", "only Flower", "both"],
)
def test_a_missing_simulation_backend_of_flower_is_reported(installed, expected, monkeypatch):
    monkeypatch.setattr(doctor, "find_spec", lambda name: object() if name in installed else None)
    assert doctor.flower_status() == expected


def test_the_line_about_flower_is_below_the_kernels(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "describe_backends", lambda: [("reference", "works")])
    monkeypatch.setattr(doctor, "find_spec", lambda name: object() if name == "flwr" else None)
    doctor.doctor_command()
    lines = capsys.readouterr().out.splitlines()
    assert any("reference" in line for line in lines)
    assert lines[-1] == doctor.flower_status()
