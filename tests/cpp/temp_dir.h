// A directory that lives as long as a test.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

namespace pagedlora::testing_support {

class TempDir {
 public:
  TempDir() {
    static std::atomic<int> next{0};
    path_ = std::filesystem::path(::testing::TempDir()) /
            ("pagedlora_" + std::to_string(::getpid()) + "_" + std::to_string(next++));
    std::filesystem::create_directories(path_);
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  std::string file(std::string_view name) const { return (path_ / name).string(); }

  // Writes the whole file, over what was there, and returns its path.
  std::string write(std::string_view name, std::string_view content) const {
    std::ofstream(file(name), std::ios::binary | std::ios::trunc) << content;
    return file(name);
  }

 private:
  std::filesystem::path path_;
};

}  // namespace pagedlora::testing_support
