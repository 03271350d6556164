"""Which mixer a layer with a state has."""

from ..checkpoints.state_layers import GatedDeltaNetConfig, StateLayersConfig
from .blocks import BlankWeights
from .gated_delta_net import GatedDeltaNet
from .state_mixer import StateMixer


def new_state_mixer(blank: BlankWeights, states: StateLayersConfig) -> StateMixer:
    """blank: of the mixer."""
    if isinstance(states, GatedDeltaNetConfig):
        return GatedDeltaNet(blank, states)
    raise TypeError(f"{type(states).__name__} has no mixer")
