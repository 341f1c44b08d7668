"""Devices by name: what is not there is refused before any work."""

from __future__ import annotations

import pytest
import torch

from mla_convert.devices import computing_devices
from mla_convert.errors import UsageError


def test_the_cpu_is_where_nothing_is_named() -> None:
    assert computing_devices(()) == (torch.device("cpu"),)


def test_names_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = computing_devices(("cuda:1", "cuda", "cpu"))
    assert found == (torch.device("cuda:1"), torch.device("cuda:0"), torch.device("cpu"))
    with pytest.raises(UsageError, match="there is no device 'cuda:2'") as refused:
        computing_devices(("cuda:2",))
    assert refused.value.remedy == "there are cuda:0, cuda:1"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gpu", "no device 'gpu'"),
        ("cuda:x", "no device 'cuda:x'"),
        ("", "no device ''"),
        ("meta", "does not compute on 'meta'"),
        ("cuda", "sees no device of the kind 'cuda'"),
    ],
)
def test_what_is_not_there_is_refused(name: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match=said):
        computing_devices(("cpu", name))
