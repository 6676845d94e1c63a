#include "pagedlora/errors.h"

#include <sstream>
#include <system_error>

#include "internal/printable.h"

namespace pagedlora {
namespace {

using internal::in_quotes;

// Whatever a message is made of, it is so long at most.
constexpr std::size_t kMessageBytes = 2000;

std::string count(std::size_t number, const char* noun) {
  return std::to_string(number) + " " + noun + (number == 1 ? "" : "s");
}

// The option that sizes a tier.
std::string size_option(const std::string& tier) { return tier + "_cache_size"; }

std::string cache_full_message(const std::string& tier, std::size_t needed_pages,
                               std::size_t free_pages, std::size_t evictable_pages) {
  return "the " + tier + " cache is full: " + count(needed_pages, "page") + " needed, " +
         std::to_string(free_pages) + " free, " + std::to_string(evictable_pages) +
         " evictable; wait for requests to finish or raise " + size_option(tier);
}

std::string pin_message(const std::string& tier, std::size_t adapter_pages,
                        std::size_t pinned_pages, std::size_t largest_pages,
                        std::size_t total_pages) {
  return "the " + tier +
         " cache cannot pin the adapter: beside pinned ones there must be room for the " +
         "largest known adapter, of " + count(largest_pages, "page") + ", but this one has " +
         std::to_string(adapter_pages) + ", pinned already are " + std::to_string(pinned_pages) +
         ", and all are " + std::to_string(total_pages) + "; unpin another one or raise " +
         size_option(tier);
}

std::string too_large_message(const std::string& tier, std::size_t needed_pages,
                              std::size_t total_pages, std::size_t page_bytes) {
  return "the adapter can never fit the " + tier + " cache: " + count(needed_pages, "page") +
         " of " + count(page_bytes, "byte") + " needed, " + std::to_string(total_pages) +
         " in all; raise " + size_option(tier) + " to " + count(needed_pages * page_bytes, "byte") +
         " or somewhat more, or use an adapter of lower rank";
}

std::string format_message(const std::string& path, const std::string& tensor,
                           const std::string& problem) {
  const std::string place =
      tensor.empty() ? in_quotes(path) : in_quotes(path) + ": tensor " + in_quotes(tensor);
  return place + ": " + problem;
}

std::string seconds(double count) {
  std::ostringstream text;
  text << count;
  return text.str();
}

}  // namespace

Error::Error(const std::string& message)
    : std::runtime_error(internal::printable(message, kMessageBytes)) {}

RequestNotLeasedError::RequestNotLeasedError(RequestId missing_request)
    : Error("request " + std::to_string(missing_request.value) +
            " has no adapter in the lease: it was not in the batch, uses the base model, or is "
            "among the lease's errors"),
      request(missing_request) {}

LoraCacheFullError::LoraCacheFullError(const std::string& message, std::string full_tier,
                                       std::size_t needed, std::size_t free, std::size_t evictable)
    : Error(message),
      tier(std::move(full_tier)),
      needed_pages(needed),
      free_pages(free),
      evictable_pages(evictable) {}

LoraCacheFullError::LoraCacheFullError(std::string full_tier, std::size_t needed, std::size_t free,
                                       std::size_t evictable)
    : LoraCacheFullError{cache_full_message(full_tier, needed, free, evictable),
                         std::move(full_tier), needed, free, evictable} {}

LoraCacheFullError LoraCacheFullError::of_pin(std::string full_tier, std::size_t adapter,
                                              std::size_t pinned, std::size_t largest,
                                              std::size_t total) {
  const std::string message = pin_message(full_tier, adapter, pinned, largest, total);
  return {message, std::move(full_tier), adapter + largest, total - pinned, 0};
}

AdapterTooLargeError::AdapterTooLargeError(std::string small_tier, std::size_t needed,
                                           std::size_t total, std::size_t bytes_per_page)
    : Error(too_large_message(small_tier, needed, total, bytes_per_page)),
      tier(std::move(small_tier)),
      needed_pages(needed),
      total_pages(total),
      page_bytes(bytes_per_page) {}

PeftTaskNotCachedError::PeftTaskNotCachedError(TaskId missing_task)
    : Error("task " + std::to_string(missing_task.value) +
            " has no source to load from: register the adapter first, or send its weights "
            "with the request"),
      task(missing_task) {}

PeftTaskNotCachedError::PeftTaskNotCachedError(TaskId missing_task, const std::string& tier)
    : Error("task " + std::to_string(missing_task.value) + " is not resident in the " + tier +
            " tier"),
      task(missing_task) {}

AdapterFormatError::AdapterFormatError(std::string file, std::string tensor_name,
                                       const std::string& problem)
    : Error(format_message(file, tensor_name, problem)),
      path(std::move(file)),
      tensor(std::move(tensor_name)) {}

AdapterSourceChangedError::AdapterSourceChangedError(std::string file,
                                                     const std::string& difference)
    : Error(in_quotes(file) + " changed since it was registered: " + difference +
            "; give its name the new content with reload(), or unload() and load() it (a name of "
            "lora_dir gets it with its next request)"),
      path(std::move(file)) {}

AdapterNotFoundError::AdapterNotFoundError(std::string file)
    : Error("there is no such file or directory: " + in_quotes(file)), path(std::move(file)) {}

AdapterPathError::AdapterPathError(std::string file, std::string directory,
                                   const std::string& problem)
    : Error("the path " + in_quotes(file) + " is not below adapter_root " + in_quotes(directory) +
            ": it " + problem + "; put the adapter into that directory, or give another one"),
      path(std::move(file)),
      root(std::move(directory)) {}

AdapterReadError::AdapterReadError(std::string file, int system_error_number)
    : Error("cannot read " + in_quotes(file) + ": " +
            std::generic_category().message(system_error_number)),
      path(std::move(file)),
      error_number(system_error_number) {}

AdapterLoadTimeout::AdapterLoadTimeout(double limit, std::size_t stuck)
    : Error(stuck == 0
                ? "the adapter's source or the device did not answer within load_timeout_s " +
                      seconds(limit) +
                      "; check the storage, or raise PeftCacheConfig.load_timeout_s"
                : "no reader is left: " + std::to_string(stuck) +
                      " wait for sources that did not answer within load_timeout_s " +
                      seconds(limit) + "; check the storage"),
      limit_seconds(limit),
      stuck_readers(stuck) {}

AdapterInUseError::AdapterInUseError(TaskId used_task, std::size_t owners, std::size_t pins,
                                     bool is_leased)
    : Error("task " + std::to_string(used_task.value) + " is in use: " + count(owners, "owner") +
            ", " + count(pins, "pin") + (is_leased ? ", an open lease" : "") +
            "; wait until its requests are done, and unpin it"),
      task(used_task),
      num_owners(owners) {}

GpuUnavailableError::GpuUnavailableError(std::string why)
    : Error("no GPU can be used: " + why), reason(std::move(why)) {}

GpuCallError::GpuCallError(std::string failed_call, std::string name,
                           const std::string& description)
    : Error(failed_call + " failed: " + description + " (" + name +
            "); the GPU can still be used, and asking again may help"),
      call(std::move(failed_call)),
      error_name(std::move(name)) {}

OutOfMemoryError::OutOfMemoryError(std::string failed_tier, std::size_t failed_bytes)
    : Error("cannot allocate " + count(failed_bytes, "byte") + " for the " + failed_tier +
            " cache; lower " + size_option(failed_tier) + " or free memory"),
      tier(std::move(failed_tier)),
      bytes(failed_bytes) {}

}  // namespace pagedlora
