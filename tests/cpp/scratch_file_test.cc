// What is kept beside an adapter's file for re-reads (design 3.5: m/n, computed once per
// generation).
#include "pagedlora/scratch_file.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "fake_source.h"
#include "forked.h"
#include "pagedlora/errors.h"
#include "temp_dir.h"
#include "thrown_by.h"

namespace pagedlora {
namespace {

using testing_support::FakeSource;
using testing_support::holds_in_child;
using testing_support::TempDir;
using testing_support::thrown_by;

std::vector<std::byte> bytes_of(std::size_t count, int seed) {
  std::vector<std::byte> bytes(count);
  for (std::size_t i = 0; i < count; ++i) {
    bytes[i] = static_cast<std::byte>(static_cast<unsigned>(seed) * 31 + i * 7);
  }
  return bytes;
}

std::vector<std::byte> read(const ScratchPiece& piece, std::uint64_t offset, std::size_t count) {
  std::vector<std::byte> into(count);
  piece.read(offset, into);
  return into;
}

class ScratchFileTest : public ::testing::Test {
 protected:
  TempDir dir_;
  std::shared_ptr<ScratchFile> file_ = ScratchFile::create(dir_.file("."));
};

TEST_F(ScratchFileTest, PiecesHoldWhatWasWrittenAndHaveNoName) {
  const auto first = file_->append(bytes_of(1'000, 1));
  const auto second = file_->append(bytes_of(5, 2));
  EXPECT_EQ(read(*first, 0, 1'000), bytes_of(1'000, 1));
  EXPECT_EQ(read(*second, 0, 5), bytes_of(5, 2));
  const std::vector<std::byte> all = bytes_of(1'000, 1);
  EXPECT_EQ(read(*first, 990, 10), std::vector<std::byte>(all.end() - 10, all.end()));
  EXPECT_TRUE(std::filesystem::is_empty(dir_.file(".")));
}

TEST_F(ScratchFileTest, APieceEndsWhereItEnds) {
  const auto first = file_->append(bytes_of(16, 1));
  const auto second = file_->append(bytes_of(16, 2));
  std::vector<std::byte> into(17);
  EXPECT_THROW(first->read(0, into), InvalidArgumentError);
  EXPECT_THROW(first->read(17, {}), InvalidArgumentError);
  EXPECT_NO_THROW(first->read(16, {}));
}

TEST_F(ScratchFileTest, PiecesKeepTheFileAndGiveTheirSpaceBack) {
  auto big = file_->append(bytes_of(1U << 20, 1));
  const auto kept = file_->append(bytes_of(4'096, 2));
  EXPECT_GE(file_->used_bytes(), 1U << 20);
  big.reset();
  EXPECT_LT(file_->used_bytes(), 64U << 10);
  for (int round = 0; round < 100; ++round) {
    file_->append(bytes_of(96, round));  // dropped at once
  }
  EXPECT_LT(file_->used_bytes(), 64U << 10);
  file_.reset();
  EXPECT_EQ(read(*kept, 0, 4'096), bytes_of(4'096, 2));
}

TEST_F(ScratchFileTest, ManyThreadsMayAppend) {
  std::vector<std::thread> threads;
  std::vector<std::shared_ptr<const ScratchPiece>> pieces(8);
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] {
      for (int round = 0; round < 50; ++round) {
        pieces[static_cast<std::size_t>(i)] = file_->append(bytes_of(777, i));
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (int i = 0; i < 8; ++i) {
    EXPECT_EQ(read(*pieces[static_cast<std::size_t>(i)], 0, 777), bytes_of(777, i));
  }
}

TEST_F(ScratchFileTest, AChildProcessReadsAndChangesNothing) {
  auto piece = file_->append(bytes_of(8'192, 1));
  EXPECT_TRUE(holds_in_child([&] {
    const bool is_right = read(*piece, 0, 8'192) == bytes_of(8'192, 1);
    const bool is_refused =
        thrown_by<InvalidArgumentError>([&] { file_->append(bytes_of(8'192, 2)); }).has_value();
    piece.reset();
    file_.reset();
    return is_right && is_refused;
  }));
  EXPECT_EQ(read(*piece, 0, 8'192), bytes_of(8'192, 1));
  const auto next = file_->append(bytes_of(10, 3));
  EXPECT_EQ(read(*next, 0, 10), bytes_of(10, 3));
}

TEST_F(ScratchFileTest, ADirectoryThatIsNotThereIsNamed) {
  const std::string missing = dir_.file("missing");
  const auto error = thrown_by<AdapterReadError>([&] { ScratchFile::create(missing); });
  EXPECT_EQ(error ? error->error_number : 0, ENOENT);
  EXPECT_NE(std::string(error ? error->what() : "").find(missing), std::string::npos);
}

TEST_F(ScratchFileTest, ATailLiesBehindTheSource) {
  const auto head = std::make_shared<FakeSource>(bytes_of(100, 3));
  const auto source = with_tail(head, file_->append(bytes_of(50, 4)));
  EXPECT_EQ(source->size_bytes(), 150U);
  EXPECT_EQ(source->description(), head->description());
  const auto reader = source->open();
  std::vector<std::byte> all(150);
  reader->read(0, all);
  std::vector<std::byte> expected = bytes_of(100, 3);
  const std::vector<std::byte> tail = bytes_of(50, 4);
  expected.insert(expected.end(), tail.begin(), tail.end());
  EXPECT_EQ(all, expected);
  for (const auto& [offset, count] : {std::pair<std::size_t, std::size_t>{0, 100},
                                      {100, 50},
                                      {99, 2},
                                      {40, 0},
                                      {120, 30},
                                      {100, 0}}) {
    std::vector<std::byte> piece(count);
    reader->read(offset, piece);
    EXPECT_TRUE(std::equal(piece.begin(), piece.end(),
                           expected.begin() + static_cast<std::ptrdiff_t>(offset)));
  }
  std::vector<std::byte> one(1);
  EXPECT_THROW(reader->read(150, one), InvalidArgumentError);
}

TEST_F(ScratchFileTest, TheChecksOfTheSourceStay) {
  const auto head = std::make_shared<FakeSource>(bytes_of(100, 3));
  const auto source = with_tail(head, file_->append(bytes_of(50, 4)));
  head->fail_finish = true;
  const auto reader = source->open();
  EXPECT_THROW(reader->finish(), AdapterSourceChangedError);
  head->fail_open = true;
  EXPECT_THROW(source->open(), AdapterNotFoundError);
}

}  // namespace
}  // namespace pagedlora
