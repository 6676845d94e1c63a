// fake/device.h under the names that the tests use.
#pragma once

#include "pagedlora/fake/device.h"

namespace pagedlora::testing_support {

using fake::CopyFailure;
using FakeDevice = fake::Device;

}  // namespace pagedlora::testing_support
