"""What the server and a worker say to each other, and the frames of all our sockets.

One Unix stream socket per worker. A frame is four bytes of length (big endian) and one msgpack
message. The worker sends one `Step` frame per engine step, whatever the number of requests in it.
End of file is death, in both directions.
"""

from __future__ import annotations

from array import array
from enum import Enum
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.frames import HEADER as HEADER
from penstock.frames import MAX_FRAME_BYTES, too_large
from penstock.frames import FrameReader as FrameReader
from penstock.memory.cost import CostModel  # noqa: TC001 - msgspec reads the annotation

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterable, Mapping, Sequence

    TokenIds = Sequence[int]
else:
    TokenIds = array  # four bytes a token, in a process as on the wire


TOKEN_ID_BYTES = 4


class Reserve(Enum):
    """How much KV a request must find before it joins the batch."""

    EXPECTED = "expected"  # what such requests have come to; a wrong guess is computed again later
    WORST_CASE = "worst_case"  # all it may ever hold: nobody ever gives way


class EngineKind(Enum):
    """What a worker makes of the model it loads."""

    GENERATE = "generate"
    ENCODE = "encode"  # vectors and scores: without KV


class LoadSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which model a worker loads and within what; it gets this at its birth."""

    name: str
    path: str  # a model folder in Hugging Face layout
    device: str  # "cpu" or "cuda:0", already resolved
    dtype: str  # "auto", "float32", "bfloat16", "float16", or a format of weights made at load
    memory_bytes: int  # the grant: KV and the largest step together, weights aside
    largest_memory_bytes: int | None = None  # the most a later `Grant` may come to; None: this one
    kv_tokens: int | None = None  # the user's own size of the KV; None: what the grant leaves
    kv_dtype: str = "auto"  # as in the settings
    profile_dir: str | None = None  # where measured costs are kept between loads
    cache_dir: str | None = None  # where KV is kept on disk
    cache_size: str = "auto"  # how much of it, as in the config
    tier_bytes: int = 0  # the most RAM that a `Grant` may ever give to KV of another device
    reserve: Reserve = Reserve.EXPECTED
    capped: bool = True  # enforce the grant; off where several engines share a process
    window: int | None = None  # of the model, as the catalog has it; None: it is read there
    max_context: int | None = None  # the user's own limit below the model's window
    step_tokens: int = 1024  # the most tokens computed in one step
    step_sequences: int = 64  # the most sequences in one step
    step_target_s: float | None = None  # chunks shrink to keep a step near this
    threads: int | None = None  # CPU threads; None: the machine's cores
    trust_remote_code: bool = False
    speculation: str = "off"  # "auto": steps verify guessed tokens where the device can
    grammar_fd: int | None = None  # leads to the model's grammar host; set where it is born
    yields: bool = False  # other models serve, and come first while this one is loaded
    engine: EngineKind = EngineKind.GENERATE
    pooling: str | None = None  # how an encoder's rows become one, where its files do not say
    # Of images; 0: none are taken.
    image_pixels: int = 0  # the most that one may have
    image_bytes: int = 0  # for the rows of all of them
    image_file_bytes: int = 0  # for the files of those that are not encoded yet


def token_ids(ids: Iterable[int]) -> array[int]:
    """Token ids, packed."""
    return array("i", ids)


class LogitBias(msgspec.Struct, frozen=True, array_like=True):
    """What is added to the logits of some tokens: each once, packed as they are computed with."""

    ids: bytes  # int32
    values: bytes  # float32

    @classmethod
    def of(cls, biases: Mapping[int, float]) -> LogitBias:
        """Token id to bias."""
        return cls(token_ids(biases).tobytes(), array("f", biases.values()).tobytes())


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How to choose tokens. Temperature 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int = 0  # tokens, of prompt and answer, that penalties count; 0: no window
    logit_bias: LogitBias | None = None
    allowed_ids: bytes = b""  # int32: no other token is chosen; empty: any may be
    seed: int = 0  # every random number is a function of (seed, position)
    logprobs: int | None = None  # None: off; else how many alternatives besides the chosen token


class Thinking(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where the model's reasoning ends, and how long it may be. A grammar holds from there on."""

    end: list[int]  # the tokens that close it; written for the model when the budget is spent
    start: int | None = None  # the token that opens it, if the model may do so itself
    open: bool = False  # the prompt has opened it already
    budget: int | None = None  # tokens


class Encoding(msgspec.Struct, frozen=True, omit_defaults=True):
    """A vector or a score of a text is wanted, and no token."""

    dimensions: int | None = None  # of the vector; None: all
    second: int | None = None  # of a pair: the first token of the second text's segment
    skipped: int = 0  # tokens before the text, a prompt's, that pooling may have to leave out
    raw: bool = False  # a score before its activation


class Media(msgspec.Struct, array_like=True):
    """An image of a prompt, whose placeholders are there already."""

    digest: bytes  # of the file
    data: bytes  # the file
    runs: list[int]  # the first token and how many, for each run of placeholders
    grid: tuple[int, int] = (0, 0)  # rows and columns of its tokens, where positions have them
    where: str = ""  # the field of the request that has it, for refusals

    @property
    def tokens(self) -> int:
        """Placeholders in all."""
        return sum(self.runs[1::2])


class Submit(msgspec.Struct, tag=True, omit_defaults=True):
    """A request: token ids in, tokens out. `id` is unique in the life of the worker."""

    id: int
    prompt: TokenIds
    max_tokens: int
    sampling: Sampling
    # End-of-sequence ids included, unless the client ignores them.
    stop_token_ids: TokenIds = msgspec.field(default_factory=lambda: token_ids(()))
    min_tokens: int = 0  # no stop token is chosen before that many
    prompt_logprobs: int | None = None  # like Sampling.logprobs, for the prompt's own tokens
    # Lower goes first; those above 0 leave some KV free. Set by the queue, not by clients.
    priority: int = 0
    grammar: bytes | None = None  # the key, at the model's grammar host, of what it must match
    thinking: Thinking | None = None
    salt: bytes = b""  # requests with another one never find this one's KV
    encoding: Encoding | None = None  # of an encoder; a generating model refuses it
    media: list[Media] = []  # in the order of the prompt


class Cancel(msgspec.Struct, tag=True):
    """The client has left, or a stop string was found. No answer follows for this id."""

    id: int


class Probe(msgspec.Struct, tag=True):
    """Run one real step of one token and answer `Alive` with the same number."""

    number: int


class Shutdown(msgspec.Struct, tag=True):
    """Finish the step in hand and exit."""


class Grant(msgspec.Struct, tag=True):
    """What the worker may hold from now on; answered with `Freed`."""

    kv_bytes: int
    step_bytes: int
    tier_bytes: int = 0  # of RAM, for KV of a model on another device


class Shed(msgspec.Struct, tag=True):
    """Take so many bytes from the KV grant, as far as running requests allow; then `Freed`."""

    bytes: int


ToWorker = Submit | Cancel | Probe | Grant | Shed | Shutdown


class Finish(Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"


class Candidate(msgspec.Struct, array_like=True):
    """A token and its log-probability."""

    token: int
    logprob: float


class TokenLogprobs(msgspec.Struct, array_like=True):
    """The chosen token's log-probability and the most likely alternatives, best first."""

    chosen: Candidate
    top: list[Candidate]


class Failure(msgspec.Struct, omit_defaults=True):
    """A `PenstockError` on its way to the client: `code` is one of the error table."""

    code: str
    message: str
    numbers: dict[str, str | int | float] | None = None


class Output(msgspec.Struct, omit_defaults=True):
    """What one step gave one request. With `finish` set nothing more follows for this id."""

    id: int
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] | None = None  # one per token, when asked for
    # One per prompt token, in pieces as prefill goes; None for the very first token.
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish: Finish | None = None
    failure: Failure | None = None  # with Finish.ERROR
    reused: int = 0  # with the first token: prompt tokens that were found computed
    preempted: int = 0  # how often it was put back so far
    vector: bytes = b""  # of an encoder: float32, little endian
    drafts: int = 0  # guesses that were verified for it in this step
    accepted: int = 0  # of those, right: tokens beyond the one that a step gives anyway


class Status(msgspec.Struct):
    """The worker's own figures after a step."""

    running: int
    waiting: int
    step_tokens: int  # tokens computed in this step
    step_s: float  # duration of this step
    host_s: float  # the part of it in which the device had nothing to do
    preemptions: int  # since start
    steps: int  # since start
    kv_capacity_bytes: int = 0  # of KV that requests can hold at once; 0: there is none
    kv_free_bytes: int = 0
    kv_evictable_bytes: int = 0  # of the free ones: computed, and found again by their tokens
    evictions: int = 0  # blocks of such, since start
    prompt_tokens: int = 0  # of requests that have begun, since start
    reused_tokens: int = 0  # of those, found computed
    private_bytes: int = 0  # of this process, when last read
    kv_committed_bytes: int = 0  # memory behind the arena
    predicted_bytes: int = 0  # of the largest step since allocators' caches were last dropped
    measured_bytes: int = 0  # the most that steps have held since then
    oom_steps: int = 0  # that ran out of memory and were taken back, since start
    underpredicted_steps: int = 0  # times that steps held more than was predicted, since start
    safety_factor: float = 1.0  # of predictions: grows when they were too low, decays
    device_s: float = 0.0  # in which the device computed, since start
    tier: dict[str, float] = {}  # figures of KV in RAM and on disk, by name
    drafts: dict[str, tuple[int, int]] = {}  # by proposer: verified and right, since start
    wants_reload: bool = False  # a better profile is stored than the one in force


class Step(msgspec.Struct, tag=True):
    """One engine step: every request's new tokens, and the worker's figures."""

    outputs: list[Output]
    status: Status
    notices: list[str] = []  # that people should see among the server's events


class Loading(msgspec.Struct, tag=True):
    """Progress of a load."""

    phase: str
    done_bytes: int
    total_bytes: int


class Ready(msgspec.Struct, tag=True):
    """The model answers from now on."""

    pid: int
    device: str
    dtype: str
    weight_bytes: int
    context: int  # the longest sequence served
    load_s: float
    cost: CostModel
    process_bytes: int  # private bytes with everything but KV and steps in place, weights included
    step_bytes: int  # the envelope of the largest step
    step_tokens: int  # the largest step, after halving
    # Of an engine that keeps KV.
    kv_tokens: int = 0  # the longest sequence that it can hold; `context` is no longer
    kv_bytes: int = 0  # what the arena was sized to
    kv_unit_bytes: int = 1  # in pieces of which it takes memory
    kv_overhead_bytes: int = 0  # of `kv_bytes`, what no request can hold
    kv_dtype: str = ""  # how it is kept
    graph_bytes: int = 0  # kept by captured steps, on the device
    outer_cap: str | None = None  # the control group around the worker, if one could be made
    # RAM that is neither weights, KV nor steps; weights mapped from a file are private or not,
    # depending on who else has them open, so this cannot be told from `process_bytes`.
    overhead_bytes: int = 0
    copied_bytes: int = 0  # weights in private RAM; the rest is mapped or on the device
    # Of a GPU: neither weights, graphs, KV nor steps, as the driver counts; 0: it does not tell.
    device_overhead_bytes: int = 0
    kept_bytes: int = 0  # of `step_bytes`: what the process itself will come to take for good
    queue_bytes: int = 0  # of `overhead_bytes`: buffers for KV on its way to and from the disk
    phases: dict[str, float] = {}  # of `load_s`, in the order in which they came
    image_pixels: int = 0  # the most that an image may have; 0: none are taken
    image_file_bytes: int = 0  # files of images that may be here at once
    image_s: float = 0.0  # to encode the largest
    no_images: str = ""  # why none are, of a model that could


class LoadFailed(msgspec.Struct, tag=True):
    """The model cannot be served; the worker exits after this."""

    failure: Failure


class Alive(msgspec.Struct, tag=True):
    """The answer to `Probe`, after a real step."""

    number: int


class Freed(msgspec.Struct, tag=True):
    """The answer to `Shed` and `Grant`: what went back to the system, and what may be held now."""

    bytes: int
    # The arena's limit from now on: never less than its requests need to finish.
    kv_bytes: int = 0
    tier_bytes: int = 0  # of RAM: what KV beside the device may hold, or still holds


FromWorker = Step | Loading | Ready | LoadFailed | Alive | Freed


def _pack(value: object) -> bytes:
    if isinstance(value, array):
        return value.tobytes()
    raise NotImplementedError(f"{type(value)} has no place in a message")


def _unpack(kind: type, value: Any) -> array[int]:
    assert kind is array
    return array("i", value)


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack)
to_worker = msgspec.msgpack.Decoder(ToWorker, dec_hook=_unpack)
from_worker = msgspec.msgpack.Decoder(FromWorker)


def frame(message: msgspec.Struct) -> bytes:
    """The message with its length in front, ready to send."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise too_large(len(body))
    return HEADER.pack(len(body)) + body


class WorkerChannel:
    """The worker's blocking end: `send` on the device thread, `receive` on one reader thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._reader = FrameReader()

    def send(self, message: FromWorker) -> None:
        """Send one message whole; raises OSError once the server is gone."""
        self._sock.sendall(frame(message))

    def receive(self) -> list[ToWorker] | None:
        """The next messages, at least one; None at end of file."""
        while True:
            data = self._sock.recv(1 << 18)
            if not data:
                return None
            if bodies := self._reader.feed(data):
                return [to_worker.decode(body) for body in bodies]

    def close(self) -> None:
        """Close the socket; the other side sees end of file."""
        self._sock.close()
