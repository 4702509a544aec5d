"""The books under everything that can happen to them, by the real decisions and the real ledger.

A world without processes: models load, are admitted to, grow, shrink, are unloaded, settle and die;
other programs come and go. After every rule the books add up, stay under the limit, hold exactly
what is alive, and a short domain has not booked anything new.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from penstock.errors import PenstockError
from penstock.memory.admission import (
    Accept,
    LoadNeed,
    ModelCapacity,
    Refuse,
    RequestNeed,
    Wait,
    decide,
    decide_growth,
    decide_load,
    owner_of,
)
from penstock.memory.cost import GroupCost, KvCost
from penstock.memory.domains import RAM
from penstock.memory.eviction import ModelUsage
from penstock.memory.ledger import Ledger, OutOfBudget, Purpose, Reservation

RULES = 20_000
NAMES = ("a", "b", "c", "d")
TOKEN = 8
BLOCK = 4
LIMIT = 10_000
CAPACITY = 12_000
SPARE = 200
KV = (RAM, Purpose.KV)


@dataclass
class Loaded:
    need: LoadNeed
    booking: Reservation
    pinned: bool
    used: int = 0  # KV bytes of admitted requests
    loading: bool = True
    settling: bool = False
    used_at: float = 0.0

    @property
    def kv(self) -> int:
        return self.booking.needs.get(KV, 0)


class World(RuleBasedStateMachine):
    rules_run: ClassVar[int] = 0

    @initialize(floor=st.integers(100, 2000))
    def open(self, floor: int) -> None:
        self.ledger = Ledger({RAM: LIMIT}, {RAM: CAPACITY}, {RAM: SPARE})
        self.ledger.reserve("server", {(RAM, Purpose.PROCESS): floor})
        self.floor = floor
        self.models: dict[str, Loaded] = {}
        self.clock = 0.0
        self.booked_before = floor

    # --- views ---

    def usages(self) -> list[ModelUsage]:
        return [
            ModelUsage(
                name,
                RAM,
                model.booking.total() - model.kv,
                model.kv,
                model.used,
                min(model.need.kv_min_bytes, model.kv),
                idle=not model.used,
                pinned=model.pinned,
                used_at=model.used_at,
            )
            for name, model in self.models.items()
            if not model.loading and not model.settling
        ]

    def capacity(self, name: str) -> ModelCapacity:
        model = self.models[name]
        fixed = model.booking.total() - model.kv
        kv = KvCost((GroupCost(TOKEN * BLOCK),), BLOCK)
        return ModelCapacity(name, RAM, 400, kv, model.kv, fixed)

    def ready(self, name: str) -> bool:
        model = self.models.get(name)
        return model is not None and not model.loading and not model.settling

    def obey(self, wait: Wait) -> None:
        """What the effects do with a `Wait`: unused KV comes back, victims settle."""
        for name, size in wait.shed:
            model = self.models[name]
            assert model.kv - size >= model.used, "KV in use was asked for"
            model.booking.resize({**model.booking.needs, KV: model.kv - size})
        for name in wait.unload:
            model = self.models[name]
            assert not model.used, "a model at work was chosen"
            assert not model.pinned
            model.settling = True
            model.booking.mark_exiting()

    # --- rules ---

    @rule(
        name=st.sampled_from(NAMES),
        weights=st.integers(1, 6000),
        step=st.integers(1, 800),
        window=st.integers(50, 3000),
        pinned=st.booleans(),
    )
    def load(self, name: str, weights: int, step: int, window: int, pinned: bool) -> None:
        if name in self.models:
            return
        fixed = {(RAM, Purpose.WEIGHTS): weights, (RAM, Purpose.STEP): step}
        need = LoadNeed(name, RAM, fixed, min(50, window), window, 3 * window)
        spent: set[str] = set()
        for _ in range(3 * len(NAMES)):
            verdict = decide_load(need, self.ledger.snapshot(), self.usages(), spent)
            if isinstance(verdict, Accept):
                booking = self.ledger.reserve(owner_of(name), need.needs(verdict.granted))
                self.models[name] = Loaded(need, booking, pinned)
                return
            if isinstance(verdict, Refuse):
                pinned_bytes = sum(m.booking.total() for m in self.models.values() if m.pinned)
                assert weights + step + need.kv_min_bytes + self.floor + pinned_bytes > LIMIT
                return
            if not (verdict.shed or verdict.unload):
                return
            spent |= {victim for victim, _ in verdict.shed}
            self.obey(verdict)
            for victim in verdict.unload:
                self.reap(victim)
        raise AssertionError("a load neither came in nor was told to wait")

    @rule(name=st.sampled_from(NAMES), factor=st.floats(0.2, 1.5))
    def load_ends(self, name: str, factor: float) -> None:
        """The measured step takes the place of the estimate; KV pays for a surprise, and where it
        cannot, the load has failed."""
        model = self.models.get(name)
        if model is None or not model.loading or model.settling:
            return
        needs = model.booking.needs
        step = (RAM, Purpose.STEP)
        measured = max(int(needs[step] * factor), 1)
        kv = model.kv - max(measured - needs[step], 0)
        if kv < min(model.need.kv_min_bytes, model.kv):
            self.die(name)
            return
        model.booking.resize({**needs, step: measured, KV: kv})
        model.loading = False

    @rule(name=st.sampled_from(NAMES), prompt=st.integers(1, 500), answer=st.integers(1, 500))
    def admit(self, name: str, prompt: int, answer: int) -> None:
        if not self.ready(name):
            return
        need, capacity = RequestNeed(prompt, answer), self.capacity(name)
        verdict = decide(need, self.ledger.snapshot(), capacity, self.usages())
        model = self.models[name]
        self.clock += 1
        model.used_at = self.clock
        if isinstance(verdict, Accept):
            assert verdict.granted >= 1
            size = capacity.bytes_for(prompt + verdict.granted)
            assert size <= model.kv
            model.used = min(model.used + size, model.kv)
        elif isinstance(verdict, Refuse):
            assert isinstance(verdict.error, PenstockError)
            others = sum(
                r.fixed_bytes + r.kv_min_bytes for r in self.usages() if r.pinned and r.name != name
            )
            ever = LIMIT - self.floor - capacity.fixed_bytes - others
            fits = capacity.window >= prompt + 1 and capacity.bytes_for(prompt + 1) <= ever
            assert not fits, "refused although it could fit"
        else:
            self.grow(name, verdict.grow_bytes)

    @rule(name=st.sampled_from(NAMES), size=st.integers(1, 9000))
    def grow(self, name: str, size: int) -> None:
        if not self.ready(name):
            return
        model, spent = self.models[name], set[str]()
        for _ in range(3 * len(NAMES)):
            if size <= model.kv:
                return
            verdict = decide_growth(
                self.ledger.snapshot(), self.capacity(name), size, self.usages(), spent
            )
            if isinstance(verdict, Accept):
                model.booking.resize({**model.booking.needs, KV: size})
                return
            if not (verdict.shed or verdict.unload):
                return
            spent |= {victim for victim, _ in verdict.shed}
            assert name not in spent
            assert name not in verdict.unload
            self.obey(verdict)
        raise AssertionError("growth never came to an end")

    @rule(name=st.sampled_from(NAMES), kept=st.floats(0, 1))
    def shrink(self, name: str, kept: float) -> None:
        if self.ready(name):
            model = self.models[name]
            kv = max(int(model.kv * kept), model.used)
            model.booking.resize({**model.booking.needs, KV: kv})

    @rule(name=st.sampled_from(NAMES), left=st.floats(0, 1))
    def requests_end(self, name: str, left: float) -> None:
        if self.ready(name):
            self.models[name].used = int(self.models[name].used * left)

    @rule(name=st.sampled_from(NAMES))
    def unload(self, name: str) -> None:
        if self.ready(name) and not self.models[name].used:
            self.models[name].settling = True
            self.models[name].booking.mark_exiting()

    @rule(name=st.sampled_from(NAMES))
    def reap(self, name: str) -> None:
        model = self.models.get(name)
        if model is not None and model.settling:
            model.booking.release()
            del self.models[name]

    @rule(name=st.sampled_from(NAMES))
    def die(self, name: str) -> None:
        """Loading, ready or ending: a death gives everything back, once."""
        model = self.models.pop(name, None)
        if model is not None:
            model.booking.release()
            model.booking.release()

    @rule(external=st.integers(0, CAPACITY))
    def outside(self, external: int) -> None:
        self.ledger.observe(RAM, external)

    @precondition(lambda self: self.ledger.snapshot()[RAM].short)
    @rule(size=st.integers(1, 10_000))
    def nothing_is_booked_while_short(self, size: int) -> None:
        before = self.ledger.snapshot()
        try:
            self.ledger.reserve("late", {KV: size})
        except OutOfBudget:
            assert self.ledger.snapshot() is before
        else:
            raise AssertionError("booked in a short domain")

    # --- after every rule ---

    @invariant()
    def books_are_true(self) -> None:
        World.rules_run += 1
        if not hasattr(self, "ledger"):
            return
        self.ledger.check()
        state = self.ledger.snapshot()[RAM]
        assert state.booked_bytes <= LIMIT
        held: dict[str, Any] = {"server": {Purpose.PROCESS: self.floor}}
        for name, model in self.models.items():
            held[owner_of(name)] = {p: size for (_, p), size in model.booking.needs.items() if size}
        assert state.owners == {owner: needs for owner, needs in held.items() if needs}
        if state.short:
            assert state.booked_bytes <= self.booked_before, "grew while short"
        self.booked_before = state.booked_bytes


def test_the_books_hold_under_everything() -> None:
    plan = settings(max_examples=250, stateful_step_count=50)
    World.rules_run = 0
    while World.rules_run < RULES:
        run_state_machine_as_test(World, settings=plan)
    assert World.rules_run >= RULES
