"""Old place of names that moved to `dtypes` and `devices`."""

from lora_backends.devices import as_device, device_reasons
from lora_backends.dtypes import accumulator_dtype, dtype_name, dtype_names

__all__ = ["accumulator_dtype", "as_device", "device_reasons", "dtype_name", "dtype_names"]
