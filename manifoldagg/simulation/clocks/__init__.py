"""Clocks: who finishes when, in virtual time: delays, schedulers, participation, traces. It knows no model."""

__all__: list[str] = []
