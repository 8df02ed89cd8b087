"""Messages of the control plane: frozen Structs, msgpack, one union per channel.

Rules (docs/ARCHITECTURE.md, message table): tagged, array-like, fields are only
ever appended and then have defaults, encoders and decoders are reused, and a peer
of another `VERSION` is refused at hello. Tensor bytes never travel in a message;
descriptors name them.

Two kinds of channel:
- *data channel*, frontend <-> executor: `ToExecutor`, `ToFrontend`
- *link*, every process <-> coordinator: `ToCoordinator`, `FromCoordinator`
"""

from __future__ import annotations

import msgspec

from shmserve.protocol.control.data_messages import (
    Answer,
    Cancel,
    Credit,
    Execute,
    ExecutorHello,
    FrontendHello,
    Release,
)
from shmserve.protocol.control.history_messages import AskHistory, HistoryGiven
from shmserve.protocol.control.link_messages import (
    Adopt,
    AskStats,
    Desired,
    Drain,
    Exited,
    GiveBack,
    Grant,
    Granted,
    Hello,
    Loaded,
    LoadFailed,
    Show,
    Shown,
    Started,
    Stats,
    Stop,
    Trim,
    Welcome,
)
from shmserve.protocol.control.model_messages import LoadModel, ModelAnswer, UnloadModel
from shmserve.protocol.control.region_messages import (
    DropRegions,
    NeedRegion,
    ProbeRegion,
    RegionAnswer,
    RegionGiven,
    RegionProbed,
    RegionsClosed,
    RegionsGone,
    RegionShrunk,
    RegisterCudaRegion,
    RegisterRegion,
    StoredRegions,
    StoreRegions,
    UnregisterRegions,
)
from shmserve.protocol.control.settings_messages import (
    ChangeLog,
    ChangeTrace,
    LogChanged,
    SettingsAnswer,
    TakeTraces,
)
from shmserve.protocol.control.stats_messages import (
    AskReport,
    CounterPage,
    DropPages,
    ReportGiven,
    StoredPages,
    StorePages,
)
from shmserve.protocol.grps_messages import OnlineSet, SetOnline

VERSION = 1

ToExecutor = FrontendHello | Execute | Cancel | Credit | Release
ToFrontend = ExecutorHello | Answer

ToCoordinator = (
    Hello | Grant | GiveBack | Loaded | LoadFailed | Started | Exited | Show | Stats | Drain
    | RegisterRegion | UnregisterRegions | NeedRegion | RegionShrunk | StoredRegions
    | RegisterCudaRegion | RegionProbed | RegionsClosed
    | SetOnline
    | CounterPage | StoredPages | AskReport | ChangeLog | ChangeTrace | TakeTraces
    | LoadModel | UnloadModel
    | AskHistory
)  # fmt: skip
FromCoordinator = (
    Welcome | Granted | Trim | AskStats | Desired | Shown | Stop | Adopt
    | RegionAnswer | RegionGiven | RegionsGone | StoreRegions | DropRegions | ProbeRegion
    | OnlineSet
    | StorePages | DropPages | ReportGiven | SettingsAnswer | LogChanged
    | ModelAnswer
    | HistoryGiven
)  # fmt: skip

# Void for a new coordinator: what the hello tells it, or what it asks or is asked again.
VOID = (
    *(GiveBack, Grant, Stats, Loaded, RegisterRegion, UnregisterRegions, NeedRegion),
    *(AskReport, ChangeLog, ChangeTrace, TakeTraces, LoadModel, UnloadModel, SetOnline),
    *(AskHistory, RegisterCudaRegion, RegionProbed, RegionsClosed, StoredRegions, StoredPages),
)

# Replies to `transport.link.Link.ask`: each has a `ticket`, and brings its question to an end.
ANSWERS = (
    *(RegionAnswer, RegionGiven, ReportGiven, SettingsAnswer, ModelAnswer, OnlineSet),
    HistoryGiven,
)

encoder = msgspec.msgpack.Encoder()
encode = encoder.encode
decode_to_executor = msgspec.msgpack.Decoder(ToExecutor).decode
decode_to_frontend = msgspec.msgpack.Decoder(ToFrontend).decode
decode_to_coordinator = msgspec.msgpack.Decoder(ToCoordinator).decode
decode_from_coordinator = msgspec.msgpack.Decoder(FromCoordinator).decode
