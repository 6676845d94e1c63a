// The error that an action throws, so that a test can look at its fields.
#pragma once

#include <exception>
#include <optional>

namespace pagedlora::testing_support {

// Nothing if `action` does not throw; other types pass through.
template <class Expected, class Action>
std::optional<Expected> thrown_by(Action&& action) {
  try {
    action();
  } catch (const Expected& error) {
    return error;
  }
  return std::nullopt;
}

template <class Expected>
bool holds(const std::exception_ptr& error) {
  return error != nullptr &&
         thrown_by<Expected>([&] { std::rethrow_exception(error); }).has_value();
}

}  // namespace pagedlora::testing_support
