#include "pagedlora/adapter_root.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <filesystem>
#include <functional>
#include <thread>

#include "internal/file_descriptor.h"
#include "pagedlora/errors.h"
#include "pagedlora/tensor_source.h"
#include "temp_dir.h"
#include "thrown_by.h"

namespace pagedlora {
namespace {

namespace fs = std::filesystem;
using internal::FileDescriptor;
using testing_support::thrown_by;

constexpr std::string_view kInside = "inside";
constexpr std::string_view kSecret = "secret";

std::string content_of(int fd) {
  const FileDescriptor owned(fd);
  std::array<char, 64> buffer{};
  const ssize_t length = ::read(owned.get(), buffer.data(), buffer.size());
  return {buffer.data(), static_cast<std::size_t>(std::max<ssize_t>(length, 0))};
}

std::size_t num_open_descriptors() {
  std::size_t count = 0;
  for ([[maybe_unused]] const auto& entry : fs::directory_iterator("/proc/self/fd")) {
    ++count;
  }
  return count;
}

// top/root/a/b/file is "inside", as is top/root/file; top/outside/file is "secret".
class AdapterRootTest : public ::testing::TestWithParam<AdapterRoot::Resolver> {
 protected:
  AdapterRootTest() {
    fs::create_directories(root_ / "a" / "b");
    fs::create_directories(top() / "outside");
    dir_.write("root/file", kInside);
    dir_.write("root/a/b/file", kInside);
    dir_.write("outside/file", kSecret);
  }

  fs::path top() const { return root_.parent_path(); }
  AdapterRoot make_root() const { return AdapterRoot(root_.string(), GetParam()); }

  std::string read(const std::string& path) const {
    const AdapterRoot root = make_root();
    return content_of(open_adapter_file(path, &root));
  }

  void expect_leaves(const std::string& path, const std::string& reason) const {
    const auto error = thrown_by<AdapterPathError>([&] { read(path); });
    ASSERT_TRUE(error.has_value()) << path;
    EXPECT_EQ(error->path, path);
    EXPECT_EQ(error->root, root_.string());
    EXPECT_NE(std::string(error->what()).find(reason), std::string::npos) << error->what();
  }

  testing_support::TempDir dir_;
  fs::path root_ = dir_.file("root");
};

INSTANTIATE_TEST_SUITE_P(Resolvers, AdapterRootTest,
                         ::testing::Values(AdapterRoot::Resolver::kKernelFirst,
                                           AdapterRoot::Resolver::kOwn),
                         [](const auto& resolver) {
                           return resolver.param == AdapterRoot::Resolver::kOwn ? "Own" : "Kernel";
                         });

TEST_P(AdapterRootTest, OpensWhatLiesBelow) {
  for (const char* path : {"file", "./file", "a//b/./file", "a/../file", "a/b/../../file"}) {
    EXPECT_EQ(read(path), kInside) << path;
    EXPECT_EQ(read((root_ / path).string()), kInside) << path;
  }
}

TEST_P(AdapterRootTest, AnAbsolutePathMayNameTheRootWithoutItsLinks) {
  fs::create_directory_symlink(root_, top() / "alias");
  const AdapterRoot root((top() / "alias").string(), GetParam());
  for (const fs::path& path : {top() / "alias" / "a/b/file", root_ / "a/b/file"}) {
    EXPECT_EQ(content_of(open_adapter_file(path.string(), &root)), kInside) << path;
  }
}

TEST_P(AdapterRootTest, RefusesWhatLiesElsewhere) {
  expect_leaves((top() / "outside/file").string(), "lies elsewhere");
  expect_leaves("/etc/passwd", "lies elsewhere");
  expect_leaves("/", "lies elsewhere");
  expect_leaves(top().string(), "lies elsewhere");
  expect_leaves(root_.string() + "x/file", "lies elsewhere");
  expect_leaves("../outside/file", "by '..'");
  expect_leaves("a/../../root/file", "by '..'");
  expect_leaves((root_ / "../outside/file").string(), "by '..'");
  expect_leaves(std::string("file\0", 5), "zero byte");
}

TEST_P(AdapterRootTest, FollowsLinksThatStay) {
  fs::create_symlink("b/file", root_ / "a" / "relative");
  fs::create_symlink("../../file", root_ / "a" / "b" / "up");
  fs::create_symlink(root_ / "a/b", root_ / "absolute");
  fs::create_symlink(root_ / "a/b", root_ / "a" / "deep");
  fs::create_symlink("absolute/../relative", root_ / "chain");
  for (const char* path :
       {"a/relative", "a/b/up", "absolute/file", "absolute/up", "a/deep/file", "chain"}) {
    EXPECT_EQ(read(path), kInside) << path;
  }
}

TEST_P(AdapterRootTest, RefusesLinksThatLeave) {
  fs::create_symlink("../outside", root_ / "out");
  fs::create_symlink(top() / "outside/file", root_ / "a" / "absolute");
  fs::create_symlink("../../../outside/file", root_ / "a" / "b" / "up");
  fs::create_symlink("/proc/self/root" + top().string() + "/outside/file", root_ / "magic");
  expect_leaves("out/file", "by '..'");
  expect_leaves("a/absolute", "by the symbolic link 'absolute'");
  expect_leaves("a/b/up", "by '..'");
  expect_leaves("magic", "by the symbolic link 'magic'");
}

TEST_P(AdapterRootTest, LinksInACircleEnd) {
  fs::create_symlink("y", root_ / "x");
  fs::create_symlink("x", root_ / "y");
  const auto error = thrown_by<AdapterReadError>([&] { read("x"); });
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->error_number, ELOOP);
}

TEST_P(AdapterRootTest, MissingFilesAndFilesAsDirectories) {
  for (const char* path : {"missing", "a/missing/file", "file/below", "file/../file"}) {
    EXPECT_TRUE(thrown_by<AdapterNotFoundError>([&] { read(path); }).has_value()) << path;
  }
}

TEST_P(AdapterRootTest, OnlyRegularFilesAndWithoutBlocking) {
  ASSERT_EQ(::mkfifo((root_ / "fifo").c_str(), 0600), 0);
  for (const char* path : {"fifo", "a", "", "a/.."}) {
    EXPECT_TRUE(thrown_by<AdapterFormatError>([&] { read(path); }).has_value()) << path;
  }
}

TEST_P(AdapterRootTest, IsTheDirectoryThatWasThereAtConstruction) {
  const AdapterRoot root = make_root();
  fs::rename(root_, top() / "moved");
  fs::create_directory_symlink(top() / "outside", root_);
  EXPECT_EQ(content_of(open_adapter_file("file", &root)), kInside);
}

TEST_P(AdapterRootTest, L6_ASourceSaysThatAnotherDirectoryHasTheNameNow) {
  const auto root = std::make_shared<const AdapterRoot>(root_.string(), GetParam());
  const std::string file = (root_ / "file").string();
  const auto source = open_file_source(file, root);
  EXPECT_FALSE(root->was_replaced());
  fs::rename(root_, top() / "moved");
  EXPECT_FALSE(root->was_replaced()) << "nothing has the name";
  fs::create_directory(root_);
  dir_.write("root/file", kSecret);
  EXPECT_TRUE(root->was_replaced());
  EXPECT_NO_THROW(source->open()) << "it is read where it went";
  fs::remove(top() / "moved" / "file");
  const auto error = thrown_by<AdapterSourceChangedError>([&] { source->open(); });
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->path, file);
  EXPECT_NE(std::string(error->what()).find("was replaced"), std::string::npos);
  fs::remove_all(root_);
  EXPECT_THROW(source->open(), AdapterNotFoundError);
}

TEST_P(AdapterRootTest, MustBeADirectory) {
  EXPECT_THROW(AdapterRoot(dir_.file("none"), GetParam()), AdapterNotFoundError);
  EXPECT_THROW(AdapterRoot((root_ / "file").string(), GetParam()), AdapterNotFoundError);
  EXPECT_THROW(AdapterRoot("", GetParam()), AdapterNotFoundError);
  EXPECT_THROW(AdapterRoot(std::string("a\0b", 3), GetParam()), AdapterNotFoundError);
}

TEST_P(AdapterRootTest, LeavesNoDescriptorBehind) {
  fs::create_symlink("../outside/file", root_ / "out");
  const std::size_t before = num_open_descriptors();
  for (const char* path : {"a/b/file", "out", "a/b/missing", "a", "a/b/../../../x"}) {
    try {
      read(path);
    } catch (const Error&) {
    }
    EXPECT_EQ(num_open_descriptors(), before) << path;
  }
}

TEST_P(AdapterRootTest, ASourceIsConfinedWheneverItIsReadAgain) {
  const auto root = std::make_shared<const AdapterRoot>(root_.string(), GetParam());
  const auto source = open_file_source("a/b/file", root);
  source->open()->finish();
  fs::rename(root_ / "a" / "b", top() / "b");  // the same file, reached by a link that leaves
  fs::create_directory_symlink(top() / "b", root_ / "a" / "b");
  EXPECT_THROW(source->open(), AdapterPathError);
  fs::remove(root_ / "a" / "b");
  fs::rename(top() / "b", root_ / "a" / "b");
  source->open()->finish();
}

// Swaps what `name` is, again and again, until it is destroyed.
class Swapper {
 public:
  Swapper(fs::path good, fs::path bad, fs::path name)
      : thread_([this, good = std::move(good), bad = std::move(bad), name = std::move(name)] {
          for (bool is_good = true; !stop_; is_good = !is_good) {
            fs::rename(name, is_good ? good : bad);
            fs::rename(is_good ? bad : good, name);
            ++num_swaps_;
          }
        }) {}
  ~Swapper() {
    stop_ = true;
    thread_.join();
  }

  int num_swaps() const { return num_swaps_; }

 private:
  std::atomic<bool> stop_{false};
  std::atomic<int> num_swaps_{0};
  std::thread thread_;
};

struct Race {
  int num_inside = 0;
  int num_refused = 0;
};

// Opens until there were many swaps and every outcome; anything but the inside is a failure.
Race race(const AdapterRoot& root, const std::string& path, const Swapper& swapper) {
  Race seen;
  while (swapper.num_swaps() < 20'000 || seen.num_inside == 0 || seen.num_refused == 0) {
    try {
      const std::string content = content_of(open_adapter_file(path, &root));
      EXPECT_EQ(content, kInside);
      ++seen.num_inside;
      if (content != kInside) {
        break;
      }
    } catch (const AdapterPathError&) {
      ++seen.num_refused;
    } catch (const AdapterNotFoundError&) {  // between the two renames
    } catch (const AdapterReadError& error) {
      EXPECT_EQ(error.error_number, ELOOP);
    }
  }
  return seen;
}

TEST_P(AdapterRootTest, ADirectorySwappedForALinkNeverLeadsOutside) {
  fs::create_directory_symlink(top() / "outside", root_ / "bad");
  const Swapper swapper(root_ / "good", root_ / "bad", root_ / "a" / "b");
  const Race seen = race(make_root(), "a/b/file", swapper);
  EXPECT_GT(seen.num_inside, 0);
  EXPECT_GT(seen.num_refused, 0);
}

TEST_P(AdapterRootTest, AFileSwappedForALinkNeverLeadsOutside) {
  fs::create_symlink("../../../outside/file", root_ / "bad");
  const Swapper swapper(root_ / "good", root_ / "bad", root_ / "a" / "b" / "file");
  const Race seen = race(make_root(), "a/b/file", swapper);
  EXPECT_GT(seen.num_inside, 0);
  EXPECT_GT(seen.num_refused, 0);
}

}  // namespace
}  // namespace pagedlora
