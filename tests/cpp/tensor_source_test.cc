#include "pagedlora/tensor_source.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <filesystem>
#include <vector>

#include "internal/file_descriptor.h"
#include "internal/pread_all.h"
#include "pagedlora/errors.h"
#include "pagedlora/fake/source.h"
#include "temp_dir.h"
#include "thrown_by.h"

namespace pagedlora {
namespace {

namespace fs = std::filesystem;
using testing_support::thrown_by;

constexpr std::string_view kContent = "0123456789abcdef";

std::string read_text(SourceReader& reader, std::uint64_t offset, std::size_t num_bytes) {
  std::string text(num_bytes, '?');
  reader.read(offset, std::as_writable_bytes(std::span(text)));
  return text;
}

template <class Expected, class Action>
void expect_message(Action&& action, const std::string& fragment) {
  const auto error = thrown_by<Expected>(action);
  ASSERT_TRUE(error.has_value()) << "expected: " << fragment;
  EXPECT_NE(std::string(error->what()).find(fragment), std::string::npos) << error->what();
}

std::size_t num_open_descriptors() {
  std::size_t count = 0;
  for ([[maybe_unused]] const auto& entry : fs::directory_iterator("/proc/self/fd")) {
    ++count;
  }
  return count;
}

void move_modification_time(const std::string& path) {
  fs::last_write_time(path, fs::last_write_time(path) + std::chrono::seconds(2));
}

class FileSourceTest : public ::testing::Test {
 protected:
  testing_support::TempDir dir_;
  std::string path_ = dir_.write("adapter.safetensors", kContent);
};

TEST_F(FileSourceTest, ReadsAnyRange) {
  const auto source = open_file_source(path_);
  EXPECT_EQ(source->size_bytes(), kContent.size());
  EXPECT_EQ(source->description(), path_);
  const auto reader = source->open();
  EXPECT_EQ(read_text(*reader, 0, 16), kContent);
  EXPECT_EQ(read_text(*reader, 10, 3), "abc");
  EXPECT_EQ(read_text(*reader, 16, 0), "");
  reader->finish();
}

TEST_F(FileSourceTest, ReaderOutlivesItsSource) {
  auto source = open_file_source(path_);
  const auto reader = source->open();
  source.reset();
  EXPECT_EQ(read_text(*reader, 0, 4), "0123");
  reader->finish();
}

TEST_F(FileSourceTest, HoldsADescriptorOnlyWhileAReaderLives) {
  const std::size_t before = num_open_descriptors();
  const auto source = open_file_source(path_);
  EXPECT_EQ(num_open_descriptors(), before);
  {
    const auto reader = source->open();
    EXPECT_EQ(num_open_descriptors(), before + 1);
  }
  EXPECT_EQ(num_open_descriptors(), before);
}

TEST_F(FileSourceTest, EmptyFileIsASource) {
  const auto source = open_file_source(dir_.write("empty", ""));
  EXPECT_EQ(source->size_bytes(), 0U);
  source->open()->finish();
}

TEST_F(FileSourceTest, ReadingBeyondTheRegisteredSizeIsMisuse) {
  const auto reader = open_file_source(path_)->open();
  for (const std::uint64_t offset : {std::uint64_t{13}, std::uint64_t{17}, ~std::uint64_t{0}}) {
    EXPECT_THROW(read_text(*reader, offset, 4), InvalidArgumentError) << offset;
  }
}

TEST_F(FileSourceTest, MissingFile) {
  const std::string path = dir_.file("missing");
  const auto error = thrown_by<AdapterNotFoundError>([&] { open_file_source(path); });
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->path, path);
  EXPECT_THROW(open_file_source(""), AdapterNotFoundError);
  EXPECT_THROW(open_file_source(path_ + "/below_a_file"), AdapterNotFoundError);
  EXPECT_THROW(open_file_source(path_ + std::string("\0hidden", 7)), AdapterNotFoundError);
}

TEST_F(FileSourceTest, WhatIsNotAFileIsRefusedWithoutBlocking) {
  const std::string fifo = dir_.file("fifo");
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  const internal::FileDescriptor socket(::socket(AF_UNIX, SOCK_STREAM, 0));
  sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
  const std::string socket_path = dir_.file("s");
  ASSERT_LT(socket_path.size(), sizeof(address.sun_path));
  std::memcpy(address.sun_path, socket_path.c_str(), socket_path.size() + 1);
  ASSERT_EQ(::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);

  const auto refusal = [](const std::string& path, const std::string& kind) {
    expect_message<AdapterFormatError>([&] { open_file_source(path); }, "is " + kind);
  };
  refusal(fs::path(path_).parent_path().string(), "a directory");
  refusal(fifo, "a FIFO");
  refusal(socket_path, "a socket");
  refusal("/dev/null", "a device");
}

TEST_F(FileSourceTest, WhatTheSystemRefusesKeepsItsErrorNumber) {
  const std::string loop = dir_.file("loop");
  fs::create_symlink(loop, loop);
  const auto looping = thrown_by<AdapterReadError>([&] { open_file_source(loop); });
  ASSERT_TRUE(looping.has_value());
  EXPECT_EQ(looping->error_number, ELOOP);
  EXPECT_EQ(looping->path, loop);
  const auto too_long =
      thrown_by<AdapterReadError>([&] { open_file_source(dir_.file(std::string(300, 'x'))); });
  ASSERT_TRUE(too_long.has_value());
  EXPECT_EQ(too_long->error_number, ENAMETOOLONG);
}

constexpr uid_t kNobody = 65534;

TEST_F(FileSourceTest, UnreadableFile) {
  ASSERT_EQ(::chmod(path_.c_str(), 0), 0);
  const uid_t user = ::geteuid();
  if (user == 0) {  // root may read every file: be somebody else meanwhile
    ASSERT_EQ(::seteuid(kNobody), 0);
  }
  const auto error = thrown_by<AdapterReadError>([&] { open_file_source(path_); });
  ASSERT_EQ(::seteuid(user), 0);
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->error_number, EACCES);
}

TEST_F(FileSourceTest, OpenNoticesRemoval) {
  const auto source = open_file_source(path_);
  fs::remove(path_);
  EXPECT_THROW(source->open(), AdapterNotFoundError);
}

TEST_F(FileSourceTest, OpenNoticesTruncation) {
  const auto source = open_file_source(path_);
  fs::resize_file(path_, 5);
  expect_message<AdapterSourceChangedError>([&] { source->open(); },
                                            "its size was 16 bytes and is 5");
}

TEST_F(FileSourceTest, OpenNoticesReplacementByRename) {
  const auto source = open_file_source(path_);
  fs::rename(dir_.write("new", kContent), path_);
  expect_message<AdapterSourceChangedError>([&] { source->open(); }, "names another file");
}

TEST_F(FileSourceTest, OpenNoticesAWriteOfTheSameSize) {
  const auto source = open_file_source(path_);
  dir_.write("adapter.safetensors", "0123456789ABCDEF");
  move_modification_time(path_);
  expect_message<AdapterSourceChangedError>([&] { source->open(); }, "it was written to");
}

TEST_F(FileSourceTest, OpenNoticesReplacementByADirectoryOrFifo) {
  const auto source = open_file_source(path_);
  fs::remove(path_);
  fs::create_directory(path_);
  expect_message<AdapterSourceChangedError>([&] { source->open(); }, "it is now a directory");
  fs::remove(path_);
  ASSERT_EQ(::mkfifo(path_.c_str(), 0600), 0);
  expect_message<AdapterSourceChangedError>([&] { source->open(); }, "it is now a FIFO");
}

TEST_F(FileSourceTest, ReadNoticesTruncation) {
  const auto reader = open_file_source(path_)->open();
  EXPECT_EQ(read_text(*reader, 0, 4), "0123");
  fs::resize_file(path_, 6);
  expect_message<AdapterSourceChangedError>([&] { read_text(*reader, 4, 12); }, "ends at 6");
}

TEST_F(FileSourceTest, FinishNoticesAWriteDuringTheRead) {
  const auto reader = open_file_source(path_)->open();
  EXPECT_EQ(read_text(*reader, 0, 16), kContent);
  dir_.write("adapter.safetensors", "0123456789ABCDEF");
  move_modification_time(path_);
  EXPECT_THROW(reader->finish(), AdapterSourceChangedError);
}

TEST(MemorySourceTest, ReadsAndKeepsItsOwnerAlive) {
  auto owner = std::make_shared<std::string>(kContent);
  const std::weak_ptr<std::string> watch = owner;
  const auto bytes = std::as_bytes(std::span(std::as_const(*owner)));
  auto source = make_memory_source(bytes, std::move(owner), "request weights");
  EXPECT_EQ(source->size_bytes(), 16U);
  EXPECT_EQ(source->description(), "request weights");
  auto reader = source->open();
  source.reset();
  EXPECT_FALSE(watch.expired());
  EXPECT_EQ(read_text(*reader, 10, 6), "abcdef");
  EXPECT_EQ(read_text(*reader, 16, 0), "");
  EXPECT_THROW(read_text(*reader, 11, 6), InvalidArgumentError);
  EXPECT_THROW(read_text(*reader, ~std::uint64_t{0}, 1), InvalidArgumentError);
  reader->finish();
  reader.reset();
  EXPECT_TRUE(watch.expired());
}

TEST(MemorySourceTest, MayBeEmpty) {
  const auto source = make_memory_source({}, nullptr, "nothing");
  EXPECT_EQ(source->size_bytes(), 0U);
  EXPECT_EQ(read_text(*source->open(), 0, 0), "");
}

// A pread that does as told, one step a call: a count to deliver, or minus an error number.
class ScriptedPread {
 public:
  explicit ScriptedPread(std::deque<int> steps) : steps_(std::move(steps)) {}

  ssize_t operator()(void* into, std::size_t num_bytes, std::uint64_t offset) {
    const int step = steps_.front();
    steps_.pop_front();
    if (step < 0) {
      errno = -step;
      return -1;
    }
    const std::size_t count = std::min(num_bytes, static_cast<std::size_t>(step));
    std::memcpy(into, kContent.data() + offset, count);
    return static_cast<ssize_t>(count);
  }

  bool is_done() const { return steps_.empty(); }

 private:
  std::deque<int> steps_;
};

struct Outcome {
  internal::ReadOutcome outcome;
  std::string text;
  bool is_done;
};

Outcome run_script(std::deque<int> steps) {
  ScriptedPread script(std::move(steps));
  std::string text(10, '?');
  const auto outcome = internal::pread_all(script, 2, std::as_writable_bytes(std::span(text)));
  return {outcome, text, script.is_done()};
}

TEST(PreadAllTest, GoesOnAfterShortReadsAndInterruptions) {
  const Outcome result = run_script({3, -EINTR, -EINTR, 1, -EINTR, 6});
  EXPECT_EQ(result.outcome.num_bytes, 10U);
  EXPECT_EQ(result.outcome.error_number, 0);
  EXPECT_EQ(result.text, "23456789ab");
  EXPECT_TRUE(result.is_done);
}

TEST(PreadAllTest, StopsAtTheEndOfTheFile) {
  const Outcome result = run_script({4, 0});
  EXPECT_EQ(result.outcome.num_bytes, 4U);
  EXPECT_EQ(result.outcome.error_number, 0);
  EXPECT_EQ(result.text, "2345??????");
}

TEST(PreadAllTest, ReportsTheFirstErrorAndWhatWasRead) {
  const Outcome result = run_script({4, -EIO});
  EXPECT_EQ(result.outcome.num_bytes, 4U);
  EXPECT_EQ(result.outcome.error_number, EIO);
}

TEST(PreadAllTest, NothingWantedReadsNothing) {
  ScriptedPread script({});
  EXPECT_EQ(internal::pread_all(script, 0, {}).num_bytes, 0U);
}

TEST(SourceGroupTest, ReadsFromTheFirstThatCanBeOpened) {
  const auto bytes = std::vector<std::byte>(64, std::byte{7});
  const auto first = std::make_shared<fake::Source>(bytes, "first");
  const auto second = std::make_shared<fake::Source>(bytes, "second");
  SourceGroup group(first);
  group.add(second);
  EXPECT_EQ(group.size_bytes(), 64U);
  EXPECT_EQ(group.description(), "first");
  group.open();
  EXPECT_EQ(first->opens, 1);
  first->fail_open = true;
  group.open();
  EXPECT_EQ(second->opens, 1);
  first->fail_open = second->fail_open = true;
  try {
    group.open();
    FAIL() << "none can be opened";
  } catch (const AdapterNotFoundError& error) {
    EXPECT_EQ(error.path, "first");
  }
  EXPECT_THROW(group.add(std::make_shared<fake::Source>(std::vector<std::byte>(63))),
               InvalidArgumentError);
}

}  // namespace
}  // namespace pagedlora
