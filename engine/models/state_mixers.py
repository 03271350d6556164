"""Which mixer a layer with a state has."""

from ..checkpoints.state_layers import GatedDeltaNetConfig, Mamba2Config, ShortConvConfig, StateLayersConfig
from .blocks import BlankWeights
from .gated_delta_net import GatedDeltaNet
from .mamba2 import Mamba2
from .short_conv import ShortConv
from .state_mixer import StateMixer


def new_state_mixer(blank: BlankWeights, states: StateLayersConfig) -> StateMixer:
    """blank: of the mixer."""
    if isinstance(states, GatedDeltaNetConfig):
        return GatedDeltaNet(blank, states)
    if isinstance(states, Mamba2Config):
        return Mamba2(blank, states)
    if isinstance(states, ShortConvConfig):
        return ShortConv(blank, states)
    raise TypeError(f"{type(states).__name__} has no mixer")
