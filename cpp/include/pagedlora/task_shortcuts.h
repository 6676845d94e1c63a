// Where a task was found the last time: saves the way through a hash map of very many, which leads
// over memory that is in no CPU cache.
//
// A table of places, at least as many as there are tasks, that the low bits of the id choose: tasks
// whose ids come from a counter have a place each, others may drive each other out. A place also
// says what will be wanted together with the task, so that the CPU can fetch both at once.
//
// What is found here has not been forgotten since: whoever destroys a task's record forgets it first.
// Thread-compatible.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <vector>

#include "pagedlora/ids.h"

namespace pagedlora {

// `Record` has id().
template <class Record>
class TaskShortcuts {
 public:
  // Makes places for so many tasks. Forgets all when there were fewer; changes nothing if it throws.
  void reserve(std::size_t num_tasks) {
    if (num_tasks > places_.size()) {
      std::vector<Place>(std::bit_ceil(num_tasks)).swap(places_);
    }
  }

  // nullptr: look elsewhere.
  Record* find(TaskId task) const {
    const Place& place = places_[position_of(task)];
    __builtin_prefetch(place.wanted_too);
    return place.record != nullptr && place.record->id() == task ? place.record : nullptr;
  }

  void remember(Record& record, const void* wanted_too) {
    places_[position_of(record.id())] = {&record, wanted_too};
  }

  void forget(const Record& record) {
    Place& place = places_[position_of(record.id())];
    if (place.record == &record) {
      place = {};
    }
  }

  // How many are remembered.
  std::size_t size() const {
    return places_.size() -
           static_cast<std::size_t>(std::ranges::count(places_, nullptr, &Place::record));
  }

 private:
  struct Place {
    Record* record = nullptr;
    const void* wanted_too = nullptr;  // an address to be fetched, never followed
  };

  std::size_t position_of(TaskId task) const { return task.value & (places_.size() - 1); }

  std::vector<Place> places_{1};  // a power of two
};

}  // namespace pagedlora
