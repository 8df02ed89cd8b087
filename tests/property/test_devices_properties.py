"""Visible devices and the choices of executors, for any setting and any devices."""

from hypothesis import given
from hypothesis import strategies as st

from shmserve.core.device_names import VARIABLE, Gpu, choose, device_name, visible

HEX = st.text("0123456789abcdef", min_size=6, max_size=6)


@st.composite
def hosts(draw):
    """Draw devices with unique names, some in MIG mode; or devices that NVML does not describe."""
    if draw(st.integers(0, 4)) == 0:
        return [Gpu()] * draw(st.integers(0, 4))
    names = iter(draw(st.lists(HEX, min_size=16, max_size=16, unique=True)))
    gpus = []
    for parts in draw(st.lists(st.none() | st.integers(0, 3), max_size=4)):
        own = tuple(f"MIG-{next(names)}" for _ in range(parts or 0))
        gpus.append(Gpu(f"GPU-{next(names)}", parts is not None, own))
    return gpus


@st.composite
def worlds(draw):
    """Draw a host and a setting that mostly names devices of the host."""
    host = draw(hosts())
    known = [gpu.uuid for gpu in host] + [part for gpu in host for part in gpu.parts]
    known += [gpu.uuid[: draw(st.integers(4, 10))] for gpu in host]
    known += [str(index) for index in range(len(host) + 1)]
    entry = st.sampled_from(known) | st.sampled_from(["-1", "", "x", "GPU-", "MIG-x"])
    entry |= st.text(max_size=4)
    return draw(st.none() | st.lists(entry, max_size=6).map(",".join)), host


@given(worlds())
def test_every_device_is_visible_at_most_once(world):
    setting, host = world
    tokens = visible(setting, host)
    assert len(set(tokens)) == len(tokens)
    if setting is None and not any(gpu.mig for gpu in host):
        assert len(tokens) == len(host)
    if not host:
        assert tokens == ()


@given(worlds())
def test_what_is_visible_sees_the_same_again(world):
    """Tokens, used as a setting, show the same devices, whatever the first setting was."""
    setting, host = world
    tokens = visible(setting, host)
    assert visible(",".join(tokens), host) == tokens


@given(worlds(), st.text("0123456789-,xGPUMI", max_size=8))
def test_what_comes_after_an_invalid_entry_changes_nothing(world, rest):
    setting, host = world
    assert visible(f"{setting or ''},-1,{rest}", host) == visible(setting or "", host)


@given(worlds())
def test_each_executor_finds_its_own_device(world):
    """With the environment that an executor chooses, device K of the service is the chosen device
    of the process."""
    setting, host = world
    environ = {} if setting is None else {VARIABLE: setting}
    tokens = visible(setting, host)
    for ordinal, token in enumerate(tokens):
        choice = choose(device_name(ordinal), environ)
        narrowed = environ if choice.visible is None else {VARIABLE: choice.visible}
        assert choose(device_name(ordinal), narrowed) == choice
        seen = tokens if choice.visible is None else visible(choice.visible, host)
        assert seen[choice.ordinal] == token
        if token.startswith("MIG-"):
            assert len(seen) == 1  # CUDA shows no more to a process
