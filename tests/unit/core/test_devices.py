"""Visible CUDA devices, by CUDA_VISIBLE_DEVICES and the driver's list."""

import pytest

from shmserve.core.device_names import Choice, Gpu, choose, device_name, ordinal_of, take, visible

A, B, C = "GPU-aaaa-1", "GPU-aaab-2", "GPU-cccc-3"
PLAIN = [Gpu(A), Gpu(B), Gpu(C)]
M1, M2, M3 = "MIG-1111", "MIG-2222", "MIG-3333"
PARTED = [Gpu(A), Gpu(B, True, (M1, M2)), Gpu(C, True, (M3,))]
UNKNOWN = [Gpu(), Gpu()]


@pytest.mark.parametrize(
    ("setting", "present", "tokens"),
    [
        (None, PLAIN, ("0", "1", "2")),
        (None, [], ()),
        ("", PLAIN, ()),
        ("-1", PLAIN, ()),
        ("NoDevFiles", PLAIN, ()),
        ("2,0", PLAIN, ("2", "0")),
        (" 2, 0", PLAIN, ("2", "0")),
        ("0,2,-1,1", PLAIN, ("0", "2")),
        ("0,3,1", PLAIN, ("0",)),
        ("1,1,0", PLAIN, ()),
        ("0,,1", PLAIN, ("0",)),
        ("1gpu2", PLAIN, ("1",)),
        (f"{C},{A}", PLAIN, (C, A)),
        ("GPU-c,GPU-aaab", PLAIN, ("GPU-c", "GPU-aaab")),
        ("GPU-aaa,GPU-c", PLAIN, ()),  # two devices begin so
        (f"GPU-c,{C},{A}", PLAIN, ()),  # the same device twice
        (f"0,{B}", PLAIN, ("0",)),
        (f"{B},0", PLAIN, (B,)),
        (f"{M2},{M1},{M3}", PARTED, (M2, M1, M3)),
        (f"{M2},{M1},{M2}", PARTED, ()),
        (f"{M2},MIG-none,{M1}", PARTED, (M2,)),
        (f"MIG-{B}/1/0", PARTED, (f"MIG-{B}/1/0",)),
        (f"MIG-{A}/1/0", PARTED, ()),  # has no MIG mode
        (None, PARTED, (M1,)),  # CUDA shows the first part alone, and no whole device beside it
        ("2,1", PARTED, (M3,)),
        ("0", PARTED, ("0",)),
        (None, [Gpu(A, True), Gpu(B)], ("1",)),  # MIG mode without parts: nothing to compute on
        (None, UNKNOWN, ("0", "1")),
        ("1,2", UNKNOWN, ("1",)),
        ("GPU-x,GPU-y,GPU-z", UNKNOWN, ("GPU-x", "GPU-y")),
        ("MIG-x,MIG-y,MIG-z", UNKNOWN, ("MIG-x", "MIG-y", "MIG-z")),
        ("MIG-x", [], ()),
    ],
)
def test_visible_devices(setting, present, tokens):
    assert visible(setting, present) == tokens


def test_an_executor_inherits_what_the_service_sees():
    assert choose("cuda:1", {}) == Choice(1, None)
    assert choose("cuda:1", {"CUDA_VISIBLE_DEVICES": "3,2"}) == Choice(1, None)
    assert choose("cuda:0", {"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2"}) == Choice(0, None)


def test_an_executor_of_a_mig_device_sees_nothing_else():
    environ = {"CUDA_VISIBLE_DEVICES": f"{M2}, {M1}"}
    assert choose("cuda:0", environ) == Choice(0, M2)
    assert choose("cuda:1", environ) == Choice(0, M1)
    assert take("cuda:1", environ) == 0
    assert environ == {"CUDA_VISIBLE_DEVICES": M1}


def test_taking_a_whole_device_or_the_cpu_changes_nothing():
    environ = {"CUDA_VISIBLE_DEVICES": "3,2"}
    assert take("cuda:1", environ) == 1
    assert take("cpu", environ) is None
    assert environ == {"CUDA_VISIBLE_DEVICES": "3,2"}


def test_names_of_devices():
    assert ordinal_of(device_name(12)) == 12
    assert ordinal_of("cpu") is None
    with pytest.raises(ValueError, match="'cpu' is not a CUDA device"):
        choose("cpu", {})
