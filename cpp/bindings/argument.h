// Arguments that say what is wrong with them: pybind11's own TypeError lists signatures, and names
// neither the argument nor what would do.
//
// `Argument<T, "name">` in place of T in a bound function has T's type in the signature and costs
// nothing more. For functions without overloads: it throws where others would be tried.
//
// Caller holds the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <string>
#include <type_traits>

#include "pagedlora/errors.h"
#include "pagedlora/ids.h"

namespace pagedlora::bindings {

template <std::size_t kSize>
struct Literal {
  // NOLINTNEXTLINE(google-explicit-constructor): so that a string can be a template argument
  consteval Literal(const char (&literal)[kSize]) { std::copy_n(literal, kSize, text); }
  char text[kSize]{};
};

// `expected` says what the argument must be; of integers and other numbers it is known.
template <class T, Literal kName, Literal kExpected = "">
struct Argument {
  T value;
};

template <Literal kName, Literal kExpected = "">
using TextArgument = Argument<std::string, kName, kExpected>;

using RequestArgument = Argument<std::uint64_t, "request_id">;
using TaskArgument = Argument<std::uint64_t, "task_id">;

inline RequestId to_id(RequestArgument request) { return {request.value}; }
inline TaskId to_id(TaskArgument task) { return {task.value}; }

template <class T>
std::string expectation(const char* expected) {
  if (*expected != '\0') {
    return expected;
  }
  if constexpr (std::is_integral_v<T>) {
    return "an integer from " + std::to_string(std::numeric_limits<T>::min()) + " to " +
           std::to_string(std::numeric_limits<T>::max());
  }
  return std::is_floating_point_v<T> ? "a number" : "of another type";
}

[[noreturn]] inline void throw_bad_argument(const char* name, pybind11::handle value,
                                            const std::string& expected) {
  const auto shown = pybind11::module_::import("pagedlora.shown").attr("shown");
  throw InvalidArgumentError(std::string(name) + " is " + shown(value).cast<std::string>() +
                             ": it must be " + expected);
}

}  // namespace pagedlora::bindings

template <class T, pagedlora::bindings::Literal kName, pagedlora::bindings::Literal kExpected>
class pybind11::detail::type_caster<pagedlora::bindings::Argument<T, kName, kExpected>> {
 public:
  using Checked = pagedlora::bindings::Argument<T, kName, kExpected>;
  static constexpr auto name = make_caster<T>::name;
  template <class>
  using cast_op_type = Checked;

  bool load(handle source, bool convert) {
    const bool is_missing = std::is_pointer_v<T> && source.is_none();
    // A bool is an int to Python, and never meant where a number is asked for.
    const bool is_bool =
        std::is_arithmetic_v<T> && !std::is_same_v<T, bool> && PyBool_Check(source.ptr()) != 0;
    if (is_missing || is_bool || !try_load(source, convert)) {
      pagedlora::bindings::throw_bad_argument(kName.text, source,
                                              pagedlora::bindings::expectation<T>(kExpected.text));
    }
    return true;
  }

  // NOLINTNEXTLINE(google-explicit-constructor): pybind11's way of taking the value
  operator Checked() { return {cast_op<T>(inner_)}; }

 private:
  bool try_load(handle source, bool convert) {
    try {
      return inner_.load(source, convert);
    } catch (const reference_cast_error&) {  // None among the elements
      return false;
    }
  }

  make_caster<T> inner_;
};
