"""All small faults. Some test must find each."""

from mutations.kernels_faults import KERNEL_FAULTS
from mutations.momentum_faults import MOMENTUM_FAULTS
from mutations.order_faults import ORDER_FAULTS
from mutations.package_faults import PACKAGE_FAULTS

FAULTS = ORDER_FAULTS + KERNEL_FAULTS + PACKAGE_FAULTS + MOMENTUM_FAULTS
