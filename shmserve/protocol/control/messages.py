"""Messages of the control plane: frozen Structs, MessagePack, one union per channel.

docs/messages.md lists every message. Rules: messages are tagged and array-like. Fields are only
ever appended, with defaults. Encoders and decoders are reused. A peer of another `VERSION` is
refused at the hello. Decoding raises only `UnreadableMessage`. Messages never carry tensor bytes,
only descriptors.

Two kinds of channel:
- *data channel*, frontend <-> executor: `ToExecutor`, `ToFrontend`
- *link*, every process <-> coordinator: `ToCoordinator`, `FromCoordinator`
"""

import msgspec

from shmserve.protocol.control import data_messages as data
from shmserve.protocol.control import history_messages as history
from shmserve.protocol.control import link_messages as link
from shmserve.protocol.control import model_messages as model
from shmserve.protocol.control import region_messages as region
from shmserve.protocol.control import settings_messages as settings
from shmserve.protocol.control import stats_messages as stats
from shmserve.protocol.decoding import msgpack_decoder

VERSION = 1

ToExecutor = data.FrontendHello | data.Execute | data.Cancel | data.Credit | data.Release
ToFrontend = data.ExecutorHello | data.Answer

ToCoordinator = (
    link.Hello | link.Grant | link.GiveBack | link.Loaded | link.LoadFailed | link.Started
    | link.Exited | link.Show | link.Stats | link.Drain | link.LanesOpen
    | link.AcquireResources | link.ReleaseResources
    | region.RegisterRegion | region.RegisterCudaRegion | region.UnregisterRegions
    | region.NeedRegion | region.RegionShrunk | region.RegionProbed | region.RegionsClosed
    | region.StoredRegions | region.SharedRegions | region.RegionsTaken
    | settings.SetFlag | settings.ChangeLog | settings.ChangeTrace | settings.TakeTraces
    | stats.CounterPage | stats.StoredPages | stats.AskReport | history.AskHistory
    | stats.RequestFailed
    | model.LoadModel | model.UnloadModel | model.ModelsFetched
)  # fmt: skip
FromCoordinator = (
    link.Welcome | link.Granted | link.Trim | link.AskStats | link.Desired | link.Shown
    | link.Stop | link.Adopt | link.Forgive | link.RegistryChanged
    | link.LaneOffered | link.MoveLanes | link.ResourcesAcquired
    | region.RegionAnswer | region.RegionGiven | region.RegionsGone | region.StoreRegions
    | region.DropRegions | region.ProbeRegion | region.SharedRegions | region.RegionsTaken
    | settings.FlagSet | settings.SettingsAnswer | settings.LogChanged
    | stats.StorePages | stats.DropPages | stats.ReportGiven | history.HistoryGiven
    | model.ModelAnswer | model.FetchModels
)  # fmt: skip

# Unsent messages to drop when the coordinator is replaced: the next Hello repeats their content,
# or the sender or the new coordinator asks again.
VOID = (
    *(link.GiveBack, link.Grant, link.Stats, link.Loaded, link.LanesOpen),
    *(link.AcquireResources, link.ReleaseResources),
    *(region.RegisterRegion, region.RegisterCudaRegion, region.UnregisterRegions),
    *(region.NeedRegion, region.RegionProbed, region.RegionsClosed, region.StoredRegions),
    *(region.SharedRegions, region.RegionsTaken),
    *(settings.SetFlag, settings.ChangeLog, settings.ChangeTrace, settings.TakeTraces),
    *(stats.StoredPages, stats.AskReport, history.AskHistory, model.LoadModel, model.UnloadModel),
    model.ModelsFetched,
)

# Replies to `transport.link.Link.ask`. Each has a `ticket` and completes the request of that
# ticket.
ANSWERS = (
    *(region.RegionAnswer, region.RegionGiven, stats.ReportGiven, history.HistoryGiven),
    *(settings.SettingsAnswer, settings.FlagSet, model.ModelAnswer, link.Granted),
)

encoder = msgspec.msgpack.Encoder()
encode = encoder.encode
decode_to_executor = msgpack_decoder(ToExecutor)
decode_to_frontend = msgpack_decoder(ToFrontend)
decode_to_coordinator = msgpack_decoder(ToCoordinator)
decode_from_coordinator = msgpack_decoder(FromCoordinator)
