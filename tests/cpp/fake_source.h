// fake/source.h under the name that the tests use.
#pragma once

#include "pagedlora/fake/source.h"

namespace pagedlora::testing_support {

using FakeSource = fake::Source;

}  // namespace pagedlora::testing_support
