"""Devices as users name them in options, checked: lists of CUDA devices, and device maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from farcall.plain import plain_text

Device = int | str | torch.device
# Any: the key type of a Mapping is invariant, so a plain dict[int, int] would not fit a union.
DeviceMap = Mapping[Any, Device]


def device_maps_of(
    given: Mapping[str, DeviceMap] | None,
) -> dict[str, dict[torch.device, torch.device]]:
    """Return the device maps of all callees, checked; none for None."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(
            f"device_maps must be a dict from worker names to maps, not {type(given).__name__}"
        )
    for to, one in given.items():
        if not isinstance(to, str) or not isinstance(one, Mapping):
            raise TypeError(
                "device_maps must be a dict from worker names to dicts of devices, not of "
                f"{type(to).__name__} to {type(one).__name__}"
            )
    return {plain_text(to): device_map_of(one) for to, one in given.items()}


def _device(device: Device) -> torch.device:
    # torch itself reads a number as a device of whatever accelerator this machine has, and fails
    # without one; a map may name the devices of another machine.
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def device_list(devices: Sequence[Device] | None) -> list[torch.device]:
    """Return CUDA devices, checked; none for None."""
    if devices is None:
        return []
    if isinstance(devices, str | bytes) or not isinstance(devices, Sequence):
        raise TypeError(f"devices must be a list of devices, not {type(devices).__name__}")
    full = [_device(device) for device in devices]
    for device in full:
        if device.type != "cuda":
            raise ValueError(
                f"`set_devices` expect a list of CUDA devices, but got device type {device.type}."
            )
    return full


def device_map_of(given: DeviceMap) -> dict[torch.device, torch.device]:
    """Return a device map, checked: it is one to one."""
    full: dict[torch.device, torch.device] = {}
    reverse: dict[torch.device, torch.device] = {}
    for key, value in given.items():
        source, target = _device(key), _device(value)
        if target in reverse:
            raise ValueError(
                "`device_map` only supports 1-to-1 mapping, "
                f"trying to map {source} and {reverse[target]} to {target}"
            )
        full[source] = target
        reverse[target] = source
    return full
