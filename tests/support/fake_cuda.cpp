// A CUDA device without memory or kernels, for fake tensors: torch's CPU build cannot run a backward pass on fake CUDA
// tensors, because autograd asks the device for its streams and events. Loaded before torch (fake_cuda.py).
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using namespace c10;

struct FakeCudaGuard final : impl::DeviceGuardImplInterface {
  static constexpr DeviceType static_type = DeviceType::CUDA;
  static Device device() { return Device(DeviceType::CUDA, 0); }
  static Stream stream() { return Stream(Stream::DEFAULT, device()); }
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return device(); }
  Device getDevice() const override { return device(); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const noexcept override { return stream(); }
  Stream getDefaultStream(Device) const override { return stream(); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return stream(); }
  Stream getNewStream(Device, int) const override { return stream(); }
  Stream exchangeStream(Stream) const noexcept override { return stream(); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const Stream&, const DeviceIndex, const EventFlag) const override {
    *event = reinterpret_cast<void*>(1);
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, FakeCudaGuard);

namespace at {
namespace {
struct CUDAHooks : CUDAHooksInterface {  // registered by this name
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace
}  // namespace at
