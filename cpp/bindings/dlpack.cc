#include "dlpack.h"

#include <array>
#include <bit>
#include <utility>

namespace pagedlora::bindings {
namespace py = pybind11;
namespace {

constexpr const char* kFresh = "dltensor";  // whoever takes the tensor renames the capsule

constexpr std::int32_t kCpu = 1;
constexpr std::int32_t kCuda = 2;
constexpr std::uint8_t kUnsigned = 1;

// The structures of the interface: their order and types are fixed.
struct DlDevice {
  std::int32_t type = kCpu;
  std::int32_t id = 0;
};
struct DlType {
  std::uint8_t code = kUnsigned;
  std::uint8_t bits = 8;
  std::uint16_t lanes = 1;
};
struct DlTensor {
  void* data = nullptr;
  DlDevice device;
  std::int32_t num_dimensions = 1;
  DlType type;
  std::int64_t* shape = nullptr;
  std::int64_t* strides = nullptr;  // none: back to back
  std::uint64_t byte_offset = 0;
};
struct DlManagedTensor {
  DlTensor tensor;
  void* context = nullptr;
  void (*deleter)(DlManagedTensor*) = nullptr;
};

struct View {
  DlManagedTensor managed;
  std::array<std::int64_t, 1> shape{};
  std::shared_ptr<const void> owner;
};

// From any thread, with the GIL or without. The owner may have threads to wait for: not with it.
void drop(DlManagedTensor* managed) {
  const std::unique_ptr<View> view(static_cast<View*>(managed->context));
  if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) {
    const py::gil_scoped_release release;
    view->owner.reset();
  }
}

void drop_unless_taken(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, kFresh) != 0) {
    drop(static_cast<DlManagedTensor*>(PyCapsule_GetPointer(capsule, kFresh)));
  }
}

}  // namespace

py::capsule to_dlpack(std::uintptr_t address, std::size_t bytes, std::optional<int> ordinal,
                      std::shared_ptr<const void> owner) {
  auto view = std::make_unique<View>();
  view->owner = std::move(owner);
  view->shape[0] = static_cast<std::int64_t>(bytes);
  DlManagedTensor& managed = view->managed;
  DlTensor& tensor = managed.tensor;
  tensor.data = std::bit_cast<void*>(address);
  tensor.device = {ordinal ? kCuda : kCpu, ordinal.value_or(0)};
  tensor.shape = view->shape.data();
  managed.deleter = &drop;
  py::capsule capsule(&managed, kFresh, &drop_unless_taken);
  managed.context = view.release();  // from here on the capsule's
  return capsule;
}

}  // namespace pagedlora::bindings
