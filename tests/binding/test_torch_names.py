"""csrc builds with the oldest supported torch, although newer headers have more names.

torch hides new functions of the stable ABI by TORCH_TARGET_VERSION, but not new macros. So a build
with a newer torch does not show that an older one works.
"""

import re
from pathlib import Path

CSRC = Path(__file__).resolve().parents[2] / "csrc"
NAME = r"\b(?:aoti_torch_\w+|(?:STD|STABLE)_\w+|TORCH_\w+|torch::(?:stable|headeronly)(?:::\w+)+)"

# All exist in the headers of torch 2.11; csrc was compiled with them when a name was added.
# Those of oneDNN are in its library alone: csrc declares them, and does without them.
OLD_ENOUGH = set(
    """
    STABLE_TORCH_LIBRARY_IMPL STD_TORCH_CHECK TORCH_ABI_VERSION TORCH_BOX TORCH_ERROR_CODE_CHECK
    TORCH_TARGET_VERSION
    aoti_torch_delete_library_object aoti_torch_library_def aoti_torch_library_init_fragment
    aoti_torch__reinterpret_tensor aoti_torch_cpu__linear_pointwise
    aoti_torch_cpu__linear_pointwise_binary aoti_torch_delete_tensor_object
    aoti_torch_device_type_cpu aoti_torch_empty_strided aoti_torch_get_current_cuda_stream
    aoti_torch_get_data_ptr aoti_torch_get_device_index aoti_torch_get_device_type
    aoti_torch_get_storage_size aoti_torch_grad_mode_is_enabled
    torch::headeronly::ScalarType torch::stable::Tensor torch::stable::accelerator::DeviceGuard
    torch::stable::contiguous torch::stable::copy_ torch::stable::detail::from
    torch::stable::detail::to torch::stable::empty torch::stable::empty_like
    torch::stable::get_num_threads torch::stable::new_empty torch::stable::parallel_for
    torch::stable::to torch::stable::zero_
    """.split()
)


def test_every_name_of_torch_is_one_that_the_oldest_has():
    used = {name for path in CSRC.rglob("*.*") for name in re.findall(NAME, path.read_text())}
    assert "TORCH_BOX" in used
    assert used <= OLD_ENOUGH, f"compile csrc with torch 2.11, then add {used - OLD_ENOUGH}"
