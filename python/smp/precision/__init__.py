"""Training in 16 bits: masters, loss scales, gradients that carry a scale, and their norm."""

from smp.precision.casts import cast_outputs as cast_outputs
from smp.precision.gradients import ScaledGradients as ScaledGradients
from smp.precision.gradients import scale as scale
from smp.precision.loss_scaler import DynamicLossScaler as DynamicLossScaler
from smp.precision.loss_scaler import LossScaler as LossScaler
from smp.precision.loss_scaler import StaticLossScaler as StaticLossScaler
from smp.precision.loss_scaler import make_loss_scaler as make_loss_scaler
