#include "internal/printable.h"

#include <gtest/gtest.h>

#include <string>

#include "pagedlora/errors.h"

namespace pagedlora {
namespace {

using internal::in_quotes;
using internal::printable;

constexpr std::size_t kLimit = 100;

TEST(PrintableTest, TextStaysAsItIs) {
  for (const char* text : {"", "adapter-1/v2 (new)",
                           "\xc3\x9c"
                           "bung",
                           "\xe6\xbc\xa2\xe5\xad\x97", "\xf0\x9f\x90\x8d"}) {
    EXPECT_EQ(printable(text, kLimit), text);
  }
}

TEST(PrintableTest, ControlsAreEscaped) {
  EXPECT_EQ(printable("a\nb\r\tc", kLimit), "a\\nb\\r\\tc");
  EXPECT_EQ(printable("\x1b[31m\x7f", kLimit), "\\x1b[31m\\x7f");
  EXPECT_EQ(printable(std::string("a\0b", 3), kLimit), "a\\x00b");
  EXPECT_EQ(printable("\xc2\x85", kLimit), "\\x85");          // next line
  EXPECT_EQ(printable("\xe2\x80\xa8", kLimit), "\\u2028");    // line separator
  EXPECT_EQ(printable("a\xe2\x80\xae", kLimit), "a\\u202e");  // right to left
}

TEST(PrintableTest, BytesThatAreNoUtf8AreEscaped) {
  EXPECT_EQ(printable("a\xff"
                      "b",
                      kLimit),
            "a\\xffb");
  EXPECT_EQ(printable("\xc3", kLimit), "\\xc3");                    // cut off
  EXPECT_EQ(printable("\xc0\xaf", kLimit), "\\xc0\\xaf");           // an overlong slash
  EXPECT_EQ(printable("\xed\xa0\x80", kLimit), "\\xed\\xa0\\x80");  // a surrogate
  EXPECT_EQ(printable("\xf4\x90\x80\x80", kLimit), "\\xf4\\x90\\x80\\x80");
}

TEST(PrintableTest, LongTextsLoseTheirMiddle) {
  const std::string text = "begin" + std::string(10'000, 'x') + "end";
  const std::string line = printable(text, kLimit);
  EXPECT_EQ(line.size(), kLimit);
  EXPECT_TRUE(line.starts_with("begin"));
  EXPECT_TRUE(line.ends_with("end"));
  EXPECT_NE(line.find(" ... "), std::string::npos);
  EXPECT_EQ(printable(std::string(kLimit, 'x'), kLimit), std::string(kLimit, 'x'));
  EXPECT_LE(printable(std::string(10'000, '\n'), kLimit).size(), kLimit);
}

TEST(PrintableTest, CharactersAreNotCutThrough) {
  for (std::size_t lead = 0; lead < 4; ++lead) {
    std::string text(lead, 'x');
    for (int i = 0; i < 1000; ++i) {
      text += "\xe6\xbc\xa2";
    }
    const std::string line = printable(text, kLimit);
    EXPECT_LE(line.size(), kLimit);
    EXPECT_EQ(line.find('\\'), std::string::npos) << line;
  }
}

TEST(PrintableTest, MessagesArePrintableAndFieldsAreNot) {
  const AdapterFormatError error("/a\nb", "t\x1b", "is broken");
  EXPECT_STREQ(error.what(), "'/a\\nb': tensor 't\\x1b': is broken");
  EXPECT_EQ(error.path, "/a\nb");
  EXPECT_EQ(error.tensor, "t\x1b");
  EXPECT_LE(std::string(InvalidArgumentError(std::string(100'000, 'x')).what()).size(), 2000U);
  EXPECT_EQ(in_quotes("a"), "'a'");
}

}  // namespace
}  // namespace pagedlora
