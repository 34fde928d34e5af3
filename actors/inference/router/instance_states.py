"""The life of an instance as the router sees it. Pure."""

from enum import Enum


class InstanceState(Enum):
    JOINING = "joining"
    """It has no version, and no version to load yet."""
    LOADING = "loading"
    """It was asked to load its policy's newest version."""
    SERVING = "serving"
    """It has acknowledged its version and gets turns."""
    DRAINING = "draining"
    """It gets no more turns, ends those it has, and then leaves or moves to another policy."""
    SUSPECTED = "suspected"
    """It may be lost, and gets no turns until it has answered."""
    GONE = "gone"
    """It has died or left. If it is restarted, it joins as another one."""


class InstanceEvent(Enum):
    LOAD = "load"
    LOADED = "loaded"
    DRAIN = "drain"
    MOVE = "move"
    SUSPECT = "suspect"
    TRUST = "trust"
    LEAVE = "leave"


_JOINING, _LOADING, _SERVING = InstanceState.JOINING, InstanceState.LOADING, InstanceState.SERVING
_DRAINING, _SUSPECTED, _GONE = InstanceState.DRAINING, InstanceState.SUSPECTED, InstanceState.GONE
_EVENT = InstanceEvent

TRANSITIONS: dict[InstanceState, dict[InstanceEvent, InstanceState]] = {
    _JOINING: {
        _EVENT.LOAD: _LOADING,
        _EVENT.DRAIN: _DRAINING,
        _EVENT.SUSPECT: _SUSPECTED,
        _EVENT.LEAVE: _GONE,
    },
    _LOADING: {
        _EVENT.LOAD: _LOADING,
        _EVENT.LOADED: _SERVING,
        _EVENT.DRAIN: _DRAINING,
        _EVENT.SUSPECT: _SUSPECTED,
        _EVENT.LEAVE: _GONE,
    },
    _SERVING: {
        _EVENT.LOAD: _LOADING,
        _EVENT.DRAIN: _DRAINING,
        _EVENT.SUSPECT: _SUSPECTED,
        _EVENT.LEAVE: _GONE,
    },
    _DRAINING: {
        _EVENT.DRAIN: _DRAINING,
        # As a new one: it has no version of the policy that it moves to.
        _EVENT.MOVE: _JOINING,
        _EVENT.SUSPECT: _SUSPECTED,
        _EVENT.LEAVE: _GONE,
    },
    _SUSPECTED: {
        _EVENT.DRAIN: _DRAINING,
        # Not to the state before: it may have missed a version, or lost its own, while it was silent.
        _EVENT.TRUST: _JOINING,
        _EVENT.LEAVE: _GONE,
    },
    _GONE: {},
}
