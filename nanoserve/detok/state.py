"""What the detokenizer remembers of each request, and for how long. Pure; owned by `DetokManager`.

A state is O(window + hold-back), whatever the stream's length. At most `max_states` of them outlive a drain, the
least recently used go first; nothing is lost with one, because the engine keeps the ids (`Resync`).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from sys import getsizeof

from nanoserve.detok.incremental import TextStream
from nanoserve.detok.logprobs import ScoreLine
from nanoserve.detok.stop_strings import Matcher
from nanoserve.ipc.messages import TextSpec

_MAX_AWAITED = 65536
_STATE_BYTES = 800  # of one state without its texts, with its decoder's; a test measures it


@dataclass(slots=True)
class RequestState:
    """One live request."""

    request_id: int
    api: int  # index of the api process that owns it
    spec: TextSpec
    stream: TextStream | None  # None: ids only
    is_plain: bool = False  # its text goes out as it is decoded: no stop strings, streamed
    matcher: Matcher | None = None
    stop_tokens: dict[int, str] = field(default_factory=dict)  # stop strings that are one special token
    scores: ScoreLine | None = None
    num_tokens: int = 0  # ids taken in: the next row begins here
    sent_chars: int = 0
    held_back: str = ""  # released by the decoder, may still become a stop string
    parts: list[str] = field(default_factory=list)  # EmitMode.FINAL: the text so far


class StateTable:
    """States by request id in order of use, and what is known of requests without a state."""

    def __init__(self, max_states: int) -> None:
        self._max_states = max_states
        self._states: OrderedDict[int, RequestState] = OrderedDict()
        # Ended here, not yet in the engine: whether what still comes of them is overrun of a stop string.
        self._ended: dict[int, bool] = {}
        self._awaited: set[int] = set()  # asked for by Resync, not yet opened again

    def __len__(self) -> int:
        return len(self._states)

    def num_bytes(self) -> int:
        """About how much memory the states hold: a fixed part each, and the text that they keep. Any thread may ask."""
        states = list(self._states.values())
        texts = sum(_text_bytes([state.held_back, *state.parts]) for state in states)
        return _STATE_BYTES * len(states) + texts

    @property
    def num_ended(self) -> int:
        return len(self._ended)

    @property
    def num_awaited(self) -> int:
        return len(self._awaited)

    def put(self, state: RequestState) -> None:
        """A new state in place of whatever was known of this request."""
        self._ended.pop(state.request_id, None)
        self._awaited.discard(state.request_id)
        self._states[state.request_id] = state
        self._states.move_to_end(state.request_id)

    def use(self, request_id: int) -> RequestState | None:
        """The state, now the most recently used one."""
        state = self._states.get(request_id)
        if state is not None:
            self._states.move_to_end(request_id)
        return state

    def end(self, request_id: int) -> None:
        """The engine has ended this request too: nothing of it will come again."""
        self._states.pop(request_id, None)
        self._ended.pop(request_id, None)
        self._awaited.discard(request_id)

    def end_before_engine(self, request_id: int, *, overrun: bool) -> None:
        """We ended this request; rows of it may come until the engine's terminal record does."""
        self._states.pop(request_id, None)
        self._ended[request_id] = overrun

    def ended_with_overrun(self, request_id: int) -> bool | None:
        """None when this request did not end here first."""
        return self._ended.get(request_id)

    def await_resync(self, request_id: int) -> bool:
        """Forgets the state. True when the engine is to be asked, False when it has been already."""
        self._states.pop(request_id, None)
        if request_id in self._awaited:
            return False
        if len(self._awaited) >= _MAX_AWAITED:
            self._awaited.clear()  # the engine does not answer for requests that api has released: do not keep those
        self._awaited.add(request_id)
        return True

    def is_awaited(self, request_id: int) -> bool:
        return request_id in self._awaited

    def evict(self) -> int:
        """Forgets the least recently used states beyond the cap. Called between drains: a drain's own are pinned."""
        num_evicted = 0
        while len(self._states) > self._max_states:
            self._states.popitem(last=False)
            num_evicted += 1
        return num_evicted

    def clear(self) -> None:
        """A new engine knows nothing of the old one's requests: it opens again those that live on."""
        self._states.clear()
        self._ended.clear()
        self._awaited.clear()


def _text_bytes(texts: list[str]) -> int:
    """Without those of one character, which Python mostly shares."""
    return sum(getsizeof(text) for text in texts if len(text) > 1)
