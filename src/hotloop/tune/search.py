"""Which settings are fastest: few trials, losers ended early, repeated until the order is certain.

One setting after another is tried on top of the best so far; at the end those that changed little once more, and what
brings nothing without another; then optuna's sampler, which knows all trials, proposes combinations. https://optuna.readthedocs.io
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import hypot, sqrt
from statistics import fmean, pstdev, stdev

import optuna

from hotloop.core.errors import HotloopError
from hotloop.core.tuning import DONE, FAILED, WORSE, Settings, Trial, Tuning, Value
from hotloop.tune.running import Chunk, Failed, Running, mean_of
from hotloop.tune.space import Knob, size_of, start_of

Start = Callable[[Settings], AbstractContextManager[Running]]


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        budget_seconds: for all trials together.
        trial_seconds: of steps, in one.
        error: standard error, as a share of the mean, from which on a trial need not go on.
        fewest: chunks that a mean is made of.
        warm_up: chunks that are left out at most; fewer if two in a row are alike.
        most_repeats: trials of one setting.
        share: of the budget that one trial may take at most.
    """

    budget_seconds: float
    trial_seconds: float = 4.0
    error: float = 0.004
    fewest: int = 5
    warm_up: int = 8
    most_repeats: int = 4
    share: float = 0.5


_ALIKE = 1.1
_HOPELESS = 1.02
"""A trial that is certainly this many times as slow as the best is not measured on."""
_CERTAIN = 2.0
"""Standard errors between two means that are told apart."""
_LITTLE = 0.1
_SAME = 0.01
"""Means that differ by less are as good as each other."""
_MOST_PROPOSALS = 30
_FAILED_FACTOR = 10.0
_IN_VAIN = 1
"""Proposals in a row that are no better, after which there are no more."""
_TOO_SHORT = "it ended before enough was measured"
_DRIFT = 0.1
"""Share of the loss by which another setting's may differ over the same steps."""


class Search:
    """One search.

    Args:
        start: a training with some settings.
        told: each trial, once it has ended.
    """

    def __init__(self, space: Sequence[Knob], start: Start, effort: Effort, told: Callable[[Trial], None]) -> None:
        self._space = space
        self._start = start
        self._effort = effort
        self._told = told
        self._began = time.monotonic()
        self._trials: list[Trial] = []
        self._first: list[Chunk] = []
        self._best = start_of(space)
        self._useless: set[str] = set()
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        sampler = optuna.samplers.TPESampler(seed=0, multivariate=True, n_startup_trials=0)
        self._study = optuna.create_study(sampler=sampler)
        self._distributions: dict[str, optuna.distributions.BaseDistribution] = {
            knob.name: optuna.distributions.CategoricalDistribution(knob.values) for knob in space
        }  # fmt: skip

    def run(self, target: tuple[str, ...]) -> Tuning:
        """Search until the best is certain, the budget is used up, or Ctrl-C.

        Raises:
            HotloopError: the training does not run with the settings as they are, or not long enough.
            KeyboardInterrupt: nothing was measured until Ctrl-C.
        """
        ended = "done"
        try:
            first = self._tried(start_of(self._space))
            if first.why == _TOO_SHORT:
                raise HotloopError("nothing was measured", _TOO_SHORT, "let it train longer: more epochs, say")
            if first.state == FAILED:
                what = "the training does not run with its present settings"
                raise HotloopError(what, first.why, "mend that first: hotloop train, or the command by itself")
            self._one_by_one()
            self._proposals()
            self._confirm()
        except _BudgetUsed:
            ended = "budget"
        except KeyboardInterrupt:
            if not self._measured(start_of(self._space)):  # there is no best so far
                raise
            ended = "interrupted"
        if not self._measured(start_of(self._space)):
            raise HotloopError("nothing was measured", "the budget was used up in the first trial", "--budget 10m")
        return self._concluded(target, ended)

    def _one_by_one(self) -> None:
        """Each value on top of the best so far. At the end, on top of what is best then, those that changed little once
        more: what held steps up before has hidden what they bring; and all values of settings that need another one,
        which may have been chosen since.
        """
        later: list[tuple[Knob, Value, Settings]] = []
        for knob in self._space:
            for path in _paths(knob):
                if knob.counts and self._best[knob.name] != knob.values[0]:
                    break  # more was better: fewer will not be
                last = 0.0
                for value in path:
                    before = self._best
                    if self._is_idle(knob, value, before):
                        later.append((knob, value, before))
                        continue
                    trial = self._tried({**before, knob.name: value})
                    little = abs(trial.sample_seconds / self._mean(before)[0] - 1) < _LITTLE
                    if (little or knob.needs) and self._best is before:
                        later.append((knob, value, before))
                    known = knob.counts or self._best[knob.name] != knob.values[0]
                    most = (1 + _SAME) * self._mean(self._best)[0] if known else (1 + _LITTLE) * last
                    if knob.rises and 0 < most < trial.sample_seconds:
                        break  # further that way it will be slower yet
                    last = trial.sample_seconds
        later += [(knob, knob.values[0], start_of(self._space)) for knob in self._space if knob.needs]
        for knob, value, before in later:
            if _key(before) != _key(self._best) and not self._is_idle(knob, value, self._best):
                self._tried({**self._best, knob.name: value})

    def _is_idle(self, knob: Knob, value: Value, settings: Settings) -> bool:
        """Whether this value brings nothing beside these settings."""
        needed = value in knob.needing and bool(knob.needs)
        return knob.name in self._useless or (
            needed and settings.get(knob.needs) == start_of(self._space).get(knob.needs)
        )

    def _proposals(self) -> None:
        in_vain, start = 0, start_of(self._space)
        for _ in range(_MOST_PROPOSALS):
            proposed = self._study.ask(self._distributions)
            settings = dict(proposed.params)
            for knob in self._space:
                if self._is_idle(knob, settings[knob.name], settings):
                    settings[knob.name] = start[knob.name]
            known = [trial for trial in self._trials if _key(trial.settings) == _key(settings)]
            before = self._best
            trial = known[0] if known else self.trial(settings)
            self._study.tell(proposed, self._value(trial))
            in_vain = 0 if self._best is not before else in_vain + (not known)
            if in_vain >= _IN_VAIN:
                return

    def _value(self, trial: Trial) -> float:
        """What the sampler is told: a failed one is far slower than any, as it learns nothing of failures as such."""
        return trial.sample_seconds or _FAILED_FACTOR * self._mean(start_of(self._space))[0]

    def _confirm(self) -> None:
        """Repeat the best, what there was, and those that may be better, by turns, until they are told apart."""
        while contenders := self._contenders():
            for settings in contenders:
                self.trial(settings)
            self._best = self._fastest()

    def _contenders(self) -> list[Settings]:
        """What has to be repeated; nothing, once the best is known to be so."""
        start, (mean, error) = start_of(self._space), self._mean(self._best)
        doubtful = []
        for settings in [*self._ranked()[:3], start]:
            other, its = self._mean(settings)
            apart, both = abs(other - mean), _CERTAIN * hypot(error, its)
            if _key(settings) == _key(self._best) or not _SAME * mean < apart < both:
                continue
            # Errors shrink with the root of the repeats: where so many are not allowed, more would be in vain.
            repeats = self._repeats(settings)
            if repeats < 2 or repeats * (both / apart) ** 2 <= self._effort.most_repeats:
                doubtful.append(settings)
        wanted = [self._best, *doubtful] if doubtful else [one for one in (self._best, start) if self._repeats(one) < 2]
        distinct = {_key(one): one for one in wanted}.values()
        return [one for one in distinct if self._repeats(one) < self._effort.most_repeats]

    def _repeats(self, settings: Settings) -> int:
        """Trials of these settings, failed ones too."""
        return sum(_key(trial.settings) == _key(settings) for trial in self._trials)

    def _tried(self, settings: Settings) -> Trial:
        """The trial of these settings; the one that there was, if there was one."""
        known = [trial for trial in self._trials if _key(trial.settings) == _key(settings)]
        if known:
            return known[-1]
        trial = self.trial(settings)
        if trial.sample_seconds or self._measured(start_of(self._space)):
            values = [self._value(trial)]
            told = optuna.trial.create_trial(params=dict(settings), distributions=self._distributions, values=values)
            self._study.add_trial(told)
        return trial

    def trial(self, settings: Settings) -> Trial:
        """Start a training with these settings, and measure it."""
        effort, now = self._effort, time.monotonic()
        left = self._began + effort.budget_seconds - now
        if left <= 0:
            raise _BudgetUsed
        deadline = now + (left if not self._trials else min(left, effort.share * effort.budget_seconds))
        regular: list[Chunk] = []
        chunks: list[Chunk] = []
        state, why = DONE, ""
        try:
            with self._start(settings) as running:
                until = deadline
                for chunk in _regular(_noted(running.chunks(deadline), chunks), effort.warm_up):
                    if chunk.trouble and self._trials:  # what there is may be in trouble
                        raise Failed(chunk.trouble)
                    self._useless.update(chunk.useless)
                    until = until if regular else min(deadline, time.monotonic() + effort.trial_seconds)
                    regular.append(chunk)
                    if self._is_hopeless(regular):
                        state = WORSE
                        break
                    if self._is_enough(regular) or (time.monotonic() > until and len(regular) >= effort.fewest):
                        break
            if state == DONE and len(regular) < effort.fewest:
                raise Failed(_TOO_SHORT)
        except (Failed, HotloopError, OSError) as failure:
            if time.monotonic() >= self._began + effort.budget_seconds:
                raise _BudgetUsed from None
            state, why = FAILED, str(failure)
        if state == DONE and (drift := self._drift(chunks)):
            state, why = FAILED, drift
        losses = _losses(chunks)
        mean, error = mean_of(regular) if state != FAILED else (0.0, 0.0)
        trial = Trial(dict(settings), state, mean, error, losses[-1] if losses else None, time.monotonic() - now, why)
        self._trials.append(trial)
        self._told(trial)
        if state == DONE and self._is_better(settings):
            self._best = settings
        return trial

    def _is_better(self, settings: Settings) -> bool:
        """By enough to be worth a change."""
        known = bool(self._measured(self._best))
        return known and self._mean(settings)[0] < (1 - _SAME) * self._mean(self._best)[0]

    def _drift(self, chunks: list[Chunk]) -> str:
        """Why these losses will not do: they are held against those of the first trial, over the same steps."""
        if not self._first:
            self._first = chunks
        first, found = _losses(self._first), _losses(chunks)
        steps = min(len(first), len(found))
        if not steps:
            return ""
        expected, mean = fmean(first[:steps]), fmean(found[:steps])
        if not abs(mean - expected) <= max(_DRIFT * abs(expected), pstdev(first[:steps])):  # NaN, too
            return f"its loss over {steps} steps was {mean:.4g} where {expected:.4g} was expected"
        return ""

    def _is_enough(self, chunks: Sequence[Chunk]) -> bool:
        mean, error = mean_of(chunks)
        return len(chunks) >= self._effort.fewest and error < self._effort.error * mean

    def _is_hopeless(self, chunks: Sequence[Chunk]) -> bool:
        if len(chunks) < self._effort.fewest or not self._ranked():
            return False
        mean, error = mean_of(chunks)
        return mean - _CERTAIN * error > _HOPELESS * self._mean(self._best)[0]

    def _measured(self, settings: Settings) -> list[float]:
        return [t.sample_seconds for t in self._trials if _key(t.settings) == _key(settings) and t.state != FAILED]

    def _mean(self, settings: Settings) -> tuple[float, float]:
        """Over the trials of these settings: one alone has the spread of its own chunks, and of starts in general."""
        found = [trial for trial in self._trials if _key(trial.settings) == _key(settings) and trial.state != FAILED]
        mean = fmean(trial.sample_seconds for trial in found)
        between = stdev(t.sample_seconds for t in found) / sqrt(len(found)) if len(found) > 1 else _SAME * mean
        return mean, max(between, max(trial.error for trial in found) / sqrt(len(found)))

    def _ranked(self) -> list[Settings]:
        """Settings that run, the fastest first."""
        found = {_key(trial.settings): trial.settings for trial in self._trials if trial.state == DONE}
        return sorted(found.values(), key=lambda settings: self._mean(settings)[0])

    def _fastest(self) -> Settings:
        """What there was, if nothing is faster by enough to be worth a change, and certainly so."""
        start = start_of(self._space)
        before, its = self._mean(start)
        for settings in self._ranked():
            mean, error = self._mean(settings)
            if before - mean > max(_SAME * before, _CERTAIN * hypot(its, error)):
                return settings
        return start

    def _concluded(self, target: tuple[str, ...], ended: str) -> Tuning:
        start, best = start_of(self._space), self._fastest()
        (before, its), (after, error) = self._mean(start), self._mean(best)
        others = [settings for settings in self._ranked() if _key(settings) != _key(best)]
        certain = True
        if others:
            second, spread = self._mean(others[0])
            certain = abs(second - after) < _SAME * after or second - after > _CERTAIN * hypot(error, spread)
        return Tuning(
            target=target,
            best=best,
            before=before,
            after=after,
            error=before / after * hypot(its / before, error / after) if best != start else 0.0,
            certain=certain,
            trials=tuple(self._trials),
            size=size_of(self._space),
            took_seconds=time.monotonic() - self._began,
            ended=ended,
        )


def _paths(knob: Knob) -> tuple[Sequence[Value], ...]:
    """Its other values in the order in which they are tried; of numbers, upwards and downwards from what there is."""
    now, *others = knob.values
    if not knob.counts:
        return (others,)
    ordered = sorted(knob.values)
    place = ordered.index(now)
    return ordered[place + 1 :], ordered[:place][::-1]


class _BudgetUsed(Exception):
    """There is no time left for another trial."""


def _regular(chunks: Iterator[Chunk], most: int) -> Iterator[Chunk]:
    """Without those before two in a row are alike."""
    before = None
    for number, chunk in enumerate(chunks):
        alike = before and max(before.seconds, chunk.seconds) <= _ALIKE * min(before.seconds, chunk.seconds)
        if alike or number >= most:
            yield chunk
            break
        before = chunk
    yield from chunks


def _noted(chunks: Iterator[Chunk], to: list[Chunk]) -> Iterator[Chunk]:
    for chunk in chunks:
        to.append(chunk)
        yield chunk


def _losses(chunks: Sequence[Chunk]) -> list[float]:
    """Of each step, as far as they are told apart."""
    return [loss for chunk in chunks for steps, loss in chunk.losses for _ in range(steps)]


def _key(settings: Settings) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, repr(value)) for name, value in settings.items()))
