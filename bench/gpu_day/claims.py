"""Claims of docs/gpu.md: the words, and the decision of each claim.

The document has a claim's id in a comment behind the words: a test compares document and module.
"""

from dataclasses import dataclass

from bench.gpu_day import figures
from bench.gpu_day.evidence import Decision, both, figure, never, tests

CUDA = "tests/cuda/test_"


@dataclass(frozen=True)
class Claim:
    """A claim; `words`: exactly as in the document."""

    id: str
    words: str
    decision: Decision


def _tests(*names: str) -> Decision:
    """`names`: "device::test_…" of tests/cuda."""
    return tests(*(f"{CUDA}{name.replace('::', '.py::test_')}" for name in names))


ELSEWHERE = never("the rules of placing need no device: `make test` has their tests")
CONTAINERS = never("needs containers beside the server's")

DECISIONS = {  # by id and words
    "G1 NVIDIA's driver, 525 or newer": figure(figures.driver),
    "G2 with the libraries that kernels are compiled with": figure(figures.cupy),
    "G3 `cupy-cuda13x` does as well": figure(figures.other_cupy),
    "G4 `onnxruntime-gpu` instead of `onnxruntime`": figure(figures.library("onnxruntime")),
    "G5 torch with CUDA": figure(figures.library("torch")),
    "G6 The doctor's trials run in processes of their own": figure(figures.doctor),
    "G7 a driver that hangs costs a deadline and no more": _tests(
        "doctor::a_driver_that_hangs_or_kills_is_told"
    ),
    "G8 that process alone uses its GPU": _tests(
        "server::cupy_is_imported_by_executors_on_gpus_alone"
    ),
    "G9 opens a device only when a request names a client's GPU memory": _tests(
        "placing::one_that_cannot_use_its_mig_device_copies_from_there"
    ),
    "G10 GPUs 0 and 1, two executors on each": ELSEWHERE,
    "G11 `kind: KIND_GPU` | every visible GPU": ELSEWHERE,
    "G12 every visible GPU if CuPy is installed, else the CPU": _tests(
        "placing::check_loads_a_model_on_its_device", "placing::a_host_without_devices"
    ),
    "G13 `kind: KIND_CPU` | the CPU": ELSEWHERE,
    "G14 Numbers count the devices that CUDA_VISIBLE_DEVICES leaves visible to the service": _tests(
        "fake::visible_devices", "placing::an_instance_on_a_mig_device_sees_it_alone"
    ),
    "G15 A KIND_GPU model without its device fails to load and says so": _tests(
        "placing::a_host_without_devices"
    ),
    "G16 A request goes to the instance on the device that holds most of its CUDA regions": _tests(
        "affinity::the_device_with_the_memory_is_preferred",
        "affinity::the_least_loaded_of_that_device_is_taken_and_then_any",
    ),
    "G17 some hundred MiB of device memory before any model does": figure(figures.context),
    "G18 Two executors on a GPU take turns unless MPS runs": never("nothing measures it"),
    "G19 one executor with requests waiting already overlaps the copy of the next input": both(
        figure(figures.overlap), _tests("running::the_next_request_is_brought_while_this_one_runs")
    ),
    "G20 its request fails, and that executor brings none in ahead any more": _tests(
        "running::a_model_that_lacks_memory_has_the_device_for_itself"
    ),
    "G21 its outputs are one DMA out of the batch's": _tests(
        "batches::each_request_is_one_dma_from_its_pinned_slot_and_one_out"
    ),
    "G22 Nothing of the next batch is brought in ahead": never(
        "nothing tests what does not happen"
    ),
    "G23 reach the device by one DMA straight from shared memory": figure(figures.bandwidth),
    "G24 when a copy of 64 KiB or more first needs it": _tests("device::small_copies_pin_nothing"),
    "G25 mapped read-only in executors and registered as such": figure(figures.read_only),
    "G26 At most the pool (`pool_bytes`) and clients' system regions are locked": never(
        "nothing reads what the system has locked"
    ),
    "G27 copies go through the driver's own buffers: slower, nothing else": both(
        figure(figures.staged),
        _tests("device::memory_that_cannot_be_pinned_keeps_no_other_from_it"),
    ),
    "G28 executors map frontends' memory once more, writable": figure(figures.mapped_again),
    "G29 counts every byte that was moved by DMA as `device`": figure(figures.counted),
    "G30 From CUDA region to CUDA region of the instance's device all of them are 0": figure(
        figures.in_place
    ),
    "G31 executors on GPUs open it": both(
        figure(figures.regions), _tests("server::region_to_region")
    ),
    "G32 to processes of the same user only, in the same PID namespace": CONTAINERS,
    "G33 `--gpus all` (or those it should have), `--ulimit memlock=-1`": CONTAINERS,
    "G34 `--ipc=host`, or the client's IPC namespace": CONTAINERS,
    "G35 clients' CUDA regions, the client in another container or on the host": CONTAINERS,
    "G36 the run directory as a volume": CONTAINERS,
    "G37 In Kubernetes": never("needs Kubernetes"),
    "G38 `/dev/shm` must be large enough for the pool": CONTAINERS,
    "G39 It is in no log, table, status or error": _tests(
        "region_desk::show_tells_kind_and_device_and_no_handle"
    ),
    "G40 a region ends with the process that registered it": figure(figures.client_deaths),
    "G41 else with `unregister`": figure(figures.rounds),
    "G42 reaches an instance on another by a copy between them (counted)": figures.needs_two(
        _tests("server::region_to_region", "device::memory_of_another_device")
    ),
    "G43 else the request is refused and names both": figures.needs_two(
        _tests("device::memory_of_another_device")
    ),
    "G44 CUDA shows a process one MIG device": _tests(
        "placing::an_instance_on_a_mig_device_sees_it_alone"
    ),
    "G45 executors are ordinary MPS clients": never("needs a running MPS"),
    "G46 in exclusive mode (`nvidia-smi -c EXCLUSIVE_PROCESS`) takes one executor only": never(
        "would change the GPU's settings"
    ),
    "G47 the request gets 503 (RESOURCE_EXHAUSTED); the executor goes on": _tests(
        "running::too_large_for_the_device",
        "device::no_memory_left_is_told_and_the_device_goes_on",
        "triton_dialect::no_memory_left_is_told_without_a_prefix",
    ),
    "G48 the request gets 500, the executor ends and another is started": _tests(
        "server::an_executor_whose_device_is_lost_is_replaced"
    ),
    "G49 requests end with their deadlines, executors are killed by `execute_timeout_s`": never(
        "no device falls off the bus on demand"
    ),
    "G50 metrics of GPUs have a gap; nobody waits for them": _tests(
        "gpu_use::what_was_read_long_ago_is_not_told", "gpu_use::a_driver_may_go_and_come_back"
    ),
    "G51 the device memory is free once executors have let go of it, within moments": both(
        figure(figures.client_deaths),
        _tests("server::the_death_of_an_exporter_gives_back_its_memory"),
    ),
    "G52 the driver takes its memory back; clients register again": both(
        figure(figures.executor_deaths), _tests("client_server::a_server_that_is_restarted")
    ),
}
CLAIMS = tuple(Claim(*named.split(" ", 1), decision) for named, decision in DECISIONS.items())
