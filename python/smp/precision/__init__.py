"""Training in 16 bits: loss scales, masters, and gradients that carry a scale."""

from smp.precision.casts import cast_inputs as cast_inputs
from smp.precision.casts import cast_outputs as cast_outputs
from smp.precision.gradients import ScaledGradients as ScaledGradients
from smp.precision.gradients import scale as scale
from smp.precision.loss_scaler import DynamicLossScaler as DynamicLossScaler
from smp.precision.loss_scaler import LossScaler as LossScaler
from smp.precision.loss_scaler import StaticLossScaler as StaticLossScaler
from smp.precision.loss_scaler import make_loss_scaler as make_loss_scaler
from smp.precision.masters import MasterViews as MasterViews
from smp.precision.masters import adopt_masters as adopt_masters
from smp.precision.masters import cut as cut
from smp.precision.masters import holdings_of as holdings_of
from smp.precision.masters import load_value as load_value
from smp.precision.masters import parameters_of as parameters_of
from smp.precision.masters import refresh_pieces as refresh_pieces
from smp.precision.masters import reload_masters as reload_masters
from smp.precision.shown_gradients import show_gradients as show_gradients
