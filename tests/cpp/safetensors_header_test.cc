#include "pagedlora/safetensors_header.h"

#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "pagedlora/errors.h"
#include "pagedlora/tensor_source.h"

namespace pagedlora {
namespace {

using Shape = std::vector<std::int64_t>;

// A whole file: length, JSON, and `data_bytes` of data.
std::string make_file(std::string_view json, std::size_t data_bytes) {
  std::string file;
  for (int i = 0; i < 8; ++i) {
    file.push_back(static_cast<char>(json.size() >> (8 * i) & 0xFF));
  }
  return file.append(json).append(data_bytes, '\x55');
}

std::shared_ptr<const TensorSource> source_of(std::string content) {
  auto owner = std::make_shared<const std::string>(std::move(content));
  const auto bytes = std::as_bytes(std::span(*owner));
  return make_memory_source(bytes, std::move(owner), "adapter.safetensors");
}

std::vector<TensorHeader> read_file(const std::string& content) {
  return read_safetensors_header(*source_of(content));
}

std::vector<TensorHeader> read(std::string_view json, std::size_t data_bytes) {
  return read_file(make_file(json, data_bytes));
}

std::string entry(std::string_view name, std::string_view dtype, std::string_view shape,
                  std::string_view offsets) {
  std::string text;
  text.append("\"").append(name).append(R"(":{"dtype":")").append(dtype);
  text.append(R"(","shape":)").append(shape).append(R"(,"data_offsets":)").append(offsets);
  return text.append("}");
}

std::string object(const std::vector<std::string>& members) {
  std::string text = "{";
  for (const std::string& member : members) {
    text.append(text.size() == 1 ? "" : ",").append(member);
  }
  return text.append("}");
}

// One tensor of four bytes, with the given text in place of its parts.
std::string one(std::string_view name, std::string_view dtype = "F32",
                std::string_view shape = "[1]", std::string_view offsets = "[0,4]") {
  return object({entry(name, dtype, shape, offsets)});
}

TEST(SafetensorsHeaderTest, ReadsTensorsInOrderOfTheirOffset) {
  const std::string json =
      object({R"("__metadata__":{"format":"pt","a":"\u00e9"})",
              entry("second", "BF16", "[2,3]", "[8,20]"), entry("first", "F32", "[2]", "[0,8]")});
  const auto tensors = read(json, 20);
  ASSERT_EQ(tensors.size(), 2U);
  EXPECT_EQ(tensors[0].name, "first");
  EXPECT_EQ(tensors[0].dtype, "F32");
  EXPECT_EQ(tensors[0].shape, Shape({2}));
  EXPECT_EQ(tensors[0].offset, 8 + json.size());
  EXPECT_EQ(tensors[0].num_bytes, 8U);
  EXPECT_EQ(tensors[1].name, "second");
  EXPECT_EQ(tensors[1].dtype, "BF16");
  EXPECT_EQ(tensors[1].shape, Shape({2, 3}));
  EXPECT_EQ(tensors[1].offset, 8 + json.size() + 8);
  EXPECT_EQ(tensors[1].num_bytes, 12U);
}

TEST(SafetensorsHeaderTest, AcceptsWhatTheFormatAllows) {
  EXPECT_TRUE(read("{}", 0).empty());
  EXPECT_TRUE(read(R"({"__metadata__":{}})", 0).empty());
  EXPECT_EQ(read(one("a") + "   \n\t\r  ", 4).size(), 1U);
  EXPECT_EQ(read(R"({ "a" :{"shape": [ 1 ],
      "data_offsets":[0 , 4],"dtype" : "F32" } })",
                 4)
                .size(),
            1U);
  EXPECT_TRUE(read(one("scalar", "F32", "[]"), 4).at(0).shape.empty());
  EXPECT_EQ(read(one("eight", "F32", "[1,1,1,1,1,1,1,1]"), 4).at(0).shape.size(), 8U);
  EXPECT_EQ(read(one(""), 4).at(0).name, "");
}

TEST(SafetensorsHeaderTest, AcceptsEmptyTensorsBetweenOthers) {
  const auto tensors =
      read(object({entry("a", "F32", "[1]", "[0,4]"), entry("end", "F32", "[0,7]", "[8,8]"),
                   entry("middle", "BF16", "[3,0]", "[4,4]"), entry("start", "U8", "[0]", "[0,0]"),
                   entry("b", "F32", "[1]", "[4,8]")}),
           8);
  std::vector<std::string> names;
  for (const TensorHeader& tensor : tensors) {
    names.push_back(tensor.name);
  }
  EXPECT_EQ(names, (std::vector<std::string>{"start", "a", "middle", "b", "end"}));
}

TEST(SafetensorsHeaderTest, ResolvesEscapesInNames) {
  const std::pair<const char*, std::string> cases[] = {
      {R"(a\"\\\/\b\f\n\r\tz)", "a\"\\/\b\f\n\r\tz"},
      {R"(\u0041\u00e9\u20AC)", "A\u00e9\u20ac"},
      {R"(\ud83d\ude00\uDBFF\uDFFF)", "\U0001F600\U0010FFFF"},
      {R"(\u0000)", std::string(1, '\0')},
      {"\u00e9\u20ac\U0001F600", "\u00e9\u20ac\U0001F600"},
  };
  for (const auto& [written, meant] : cases) {
    EXPECT_EQ(read(one(written), 4).at(0).name, meant) << written;
  }
  EXPECT_EQ(read(one("a", R"(\u004632)"), 4).at(0).dtype, "F32");
}

TEST(SafetensorsHeaderTest, KnowsTheSizesOfAllDtypes) {
  const std::pair<const char*, int> dtypes[] = {
      {"BOOL", 1},        {"U8", 1},          {"I8", 1},  {"F8_E5M2", 1}, {"F8_E4M3", 1},
      {"F8_E8M0", 1},     {"F8_E4M3FNUZ", 1}, {"I16", 2}, {"U16", 2},     {"F16", 2},
      {"F8_E5M2FNUZ", 1}, {"BF16", 2},        {"I32", 4}, {"U32", 4},     {"F32", 4},
      {"C64", 8},         {"F64", 8},         {"I64", 8}, {"U64", 8}};
  for (const auto& [dtype, bytes] : dtypes) {
    const int total = 6 * bytes;
    const auto tensors =
        read(one("a", dtype, "[2,3]", std::string("[0,") + std::to_string(total) + "]"),
             static_cast<std::size_t>(total));
    EXPECT_EQ(tensors.at(0).dtype, dtype);
  }
}

struct Hostile {
  std::string json;
  std::size_t data_bytes;
  std::string fragment;
  std::string tensor = "";
};

void expect_refused(const std::string& file, const std::string& fragment,
                    const std::string& tensor) {
  try {
    read_file(file);
    ADD_FAILURE() << "accepted: " << file.substr(0, 300);
  } catch (const AdapterFormatError& error) {
    EXPECT_NE(std::string(error.what()).find(fragment), std::string::npos)
        << error.what() << "\n  instead of " << fragment;
    EXPECT_EQ(error.path, "adapter.safetensors");
    EXPECT_EQ(error.tensor, tensor) << error.what();
  }
}

void expect_all_refused(const std::vector<Hostile>& files) {
  for (const Hostile& file : files) {
    SCOPED_TRACE(file.json.substr(0, 200));
    expect_refused(make_file(file.json, file.data_bytes), file.fragment, file.tensor);
  }
}

TEST(SafetensorsHeaderTest, RefusesLengthsThatDoNotFit) {
  expect_refused("", "it has 0 bytes", "");
  expect_refused("\x02\0\0\0\0\0\0", "at least 8", "");
  expect_refused(std::string("\0\0\0\0\0\0\0\0", 8), "does not start with '{'", "");
  expect_refused(std::string("\3\0\0\0\0\0\0\0{}", 10), "3 bytes does not fit the file of 10", "");
  expect_refused(std::string(8, '\xFF'), "18446744073709551615 bytes is over the limit", "");
  expect_refused(std::string("\1\0\0\1\0\0\0\0{}", 10), "over the limit of 16777216", "");
}

TEST(SafetensorsHeaderTest, RefusesWhatIsNotSuchAnObject) {
  expect_all_refused({
      {" {}", 0, "does not start with '{'"},
      {"[]", 0, "does not start with '{'"},
      {"\xEF\xBB\xBF{}", 0, "does not start with '{'"},
      {"{", 0, "expected a string, at byte 1"},
      {"{}x", 0, "something follows"},
      {"{}{}", 0, "something follows"},
      {std::string("{}\0", 3), 0, "something follows"},
      {"{,}", 0, "expected a string"},
      {R"({"a")", 0, "expected ':'"},
      {R"({"a":})", 0, "expected '{'", "a"},
      {R"({"a":1})", 0, "expected '{'", "a"},
      {R"({"a":null})", 0, "expected '{'", "a"},
      {R"({"a":["F32",[1],[0,4]]})", 4, "expected '{'", "a"},
      {object({entry("a", "F32", "[1]", "[0,4]"), ""}), 4, "expected a string"},
      {object({entry("a", "F32", "[1]", "[0,4]") + " " + entry("b", "F32", "[1]", "[4,8]")}), 8,
       "expected '}'"},
      {R"({"a":{"dtype":{"x":1},"shape":[1],"data_offsets":[0,4]}})", 4, "expected a string", "a"},
      {one("a", "F32", "[[1]]"), 4, "expected an integer", "a"},
      {one("a", "F32", R"(["1"])"), 4, "expected an integer", "a"},
      {one("a", "F32", "{}"), 4, "expected '['", "a"},
      {one("a", "F32", "[1,]"), 4, "expected an integer", "a"},
      {one("a", "F32", "[1 2]"), 4, "expected ']'", "a"},
      {R"({"a":{"dtype":"F32","shape":[1]}})", 4, "is missing", "a"},
      {R"({"a":{}})", 0, "is missing", "a"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":0}})", 4, "unknown key", "a"},
      {R"({"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 4, "repeated",
       "a"},
      {R"({"__metadata__":null})", 0, "expected '{'"},
      {R"({"__metadata__":{"a":1}})", 0, "expected a string"},
      {R"({"__metadata__":{"a":{"b":"c"}}})", 0, "expected a string"},
      {R"({"__metadata__":{},"__metadata__":{}})", 0, "a second \"__metadata__\""},
  });
}

TEST(SafetensorsHeaderTest, RefusesDeepNesting) {
  const std::string deep(1'000'000, '[');
  expect_all_refused({{one("a", "F32", deep), 4, "expected an integer", "a"},
                      {R"({"a":)" + deep, 4, "expected '{'", "a"},
                      {R"({"__metadata__":{"a":)" + deep, 4, "expected a string"}});
}

TEST(SafetensorsHeaderTest, RefusesBadStrings) {
  expect_all_refused({
      {"{\"a\xFF\":{}}", 0, "not valid UTF-8, at byte 3"},
      {"{\"\xC0\xAF\":{}}", 0, "not valid UTF-8, at byte 2"},  // overlong
      {"{\"\xE0\x80\x80\":{}}", 0, "not valid UTF-8"},         // overlong
      {"{\"\xED\xA0\x80\":{}}", 0, "not valid UTF-8"},         // a surrogate
      {"{\"\xF4\x90\x80\x80\":{}}", 0, "not valid UTF-8"},     // beyond U+10FFFF
      {"{\"\xE2\x82\":{}}", 0, "not valid UTF-8"},             // cut short
      {"{}\xE2\x82", 0, "not valid UTF-8, at byte 2"},         // cut short at the end
      {"{\"__metadata__\":{\"a\":\"\x80\"}}", 0, "not valid UTF-8"},
      {"{\"a\nb\":{}}", 0, "control character"},
      {std::string("{\"a\0b\":{}}", 10), 0, "control character"},
      {R"({"a)", 0, "a string has no end"},
      {R"({"a\)", 0, "a string has no end"},
      {R"({"\x41":{}})", 0, "unknown escape"},
      {R"({"\u12":{}})", 0, "four hexadecimal digits"},
      {R"({"\u12g4":{}})", 0, "four hexadecimal digits"},
      {R"({"\ud83d":{}})", 0, "half of a surrogate pair"},
      {R"({"\ud83dx":{}})", 0, "half of a surrogate pair"},
      {R"({"\ud83d\u0041":{}})", 0, "half of a surrogate pair"},
      {R"({"\ude00":{}})", 0, "half of a surrogate pair"},
  });
}

TEST(SafetensorsHeaderTest, RefusesBadNumbers) {
  const std::string fragment_of[][2] = {{"-1", "expected an integer"},
                                        {"-0", "expected an integer"},
                                        {"+1", "expected an integer"},
                                        {"1.0", "not an integer"},
                                        {"1e0", "not an integer"},
                                        {"1E2", "not an integer"},
                                        {"01", "starts with 0"},
                                        {"00", "starts with 0"},
                                        {"true", "expected an integer"},
                                        {"0x1", "expected ']'"},
                                        {"9223372036854775808", "larger than 9223372036854775807"},
                                        {"18446744073709551617", "larger"}};
  for (const auto& [number, fragment] : fragment_of) {
    expect_all_refused({{one("a", "F32", std::string("[") + number + "]"), 4, fragment, "a"}});
  }
  expect_all_refused({{one("a", "F32", "[1]", "[0,-4]"), 4, "expected an integer", "a"},
                      {one("a", "F32", "[1]", "[0]"), 4, "expected ','", "a"},
                      {one("a", "F32", "[1]", "[0,4,8]"), 4, "expected ']'", "a"},
                      {one("a", "F32", "[1]", "[]"), 4, "expected an integer", "a"}});
}

TEST(SafetensorsHeaderTest, RefusesDtypesItCannotSize) {
  expect_all_refused({
      {one("a", "F31"), 4, "unknown dtype 'F31'", "a"},
      {one("a", "f32"), 4, "unknown dtype 'f32'", "a"},
      {one("a", ""), 4, "unknown dtype ''", "a"},
      {one("a", "F\\n32"), 4, "tensor 'a': unknown dtype", "a"},
      {one("a", std::string(1000, 'F')), 4, "tensor 'a': unknown dtype", "a"},
      {one("a", "F4", "[8]"), 4, "packs several elements into a byte", "a"},
      {one("a", "F6_E2M3", "[4]", "[0,3]"), 3, "packs several elements", "a"},
      {one("a", "F6_E3M2", "[4]", "[0,3]"), 3, "packs several elements", "a"},
  });
}

TEST(SafetensorsHeaderTest, RefusesBadShapes) {
  expect_all_refused({
      {one("a", "F32", "[1,1,1,1,1,1,1,1,1]"), 4, "more than 8 dimensions", "a"},
      {one("a", "F32", "[4294967296,4294967296]"), 4, "product of its shape overflows", "a"},
      {one("a", "F32", "[9223372036854775807]"), 4, "product of its shape overflows", "a"},
      {one("a", "F64", "[2305843009213693952,8]"), 4, "product of its shape overflows", "a"},
      {one("a", "F32", "[0,4294967296,4294967296]", "[0,0]"), 0, "overflows", "a"},
      {one("a", "F32", "[2]"), 4, "need 8 bytes, its offsets give 4", "a"},
      {one("a", "F32", "[]", "[0,0]"), 0, "need 4 bytes, its offsets give 0", "a"},
      {one("a", "F32", "[0]"), 4, "need 0 bytes, its offsets give 4", "a"},
      {one("a", "BF16", "[1]"), 4, "need 2 bytes, its offsets give 4", "a"},
  });
}

TEST(SafetensorsHeaderTest, RefusesBadRanges) {
  const auto two = [](const std::string& first, const std::string& second) {
    return object({entry("a", "F32", "[1]", first), entry("b", "F32", "[1]", second)});
  };
  expect_all_refused({
      {one("a", "F32", "[1]", "[4,0]"), 4, "ends at 0, before it begins at 4", "a"},
      {one("a"), 3, "ends at byte 4 of the data section, which has 3", "a"},
      {one("a", "F32", "[1]", "[9223372036854775800,9223372036854775804]"), 4, "data section", "a"},
      {one("a"), 5, "the last 1 bytes of the file belong to no tensor"},
      {"{}", 3, "the last 3 bytes of the file belong to no tensor"},
      {one("a", "F32", "[1]", "[1,5]"), 5, "the 1 bytes before its data belong to no tensor", "a"},
      {two("[0,4]", "[6,10]"), 10, "the 2 bytes before its data belong to no tensor", "b"},
      {two("[0,4]", "[3,7]"), 7, "overlaps", "b"},
      {two("[0,4]", "[0,4]"), 4, "overlaps", "b"},
      {object({entry("a", "F32", "[1]", "[0,4]"), entry("b", "F32", "[0]", "[2,2]")}), 4,
       "overlaps", "b"},
  });
}

TEST(SafetensorsHeaderTest, RefusesDuplicateNames) {
  const std::string twice =
      object({entry("x", "F32", "[1]", "[0,4]"), entry("y", "F32", "[1]", "[4,8]"),
              entry("\\u0078", "F32", "[1]", "[8,12]")});
  expect_all_refused({{twice, 12, "its name occurs twice", "x"}});
}

std::string header_of_empty_tensors(std::size_t count) {
  std::vector<std::string> members;
  for (std::size_t i = 0; i < count; ++i) {
    members.push_back(entry(std::to_string(i), "U8", "[0]", "[0,0]"));
  }
  return object(members);
}

TEST(SafetensorsHeaderTest, LimitsTheNumberOfTensors) {
  EXPECT_EQ(read(header_of_empty_tensors(kMaxTensors), 0).size(), kMaxTensors);
  expect_refused(make_file(header_of_empty_tensors(kMaxTensors + 1), 0), "more than 100000 tensors",
                 "");
}

TEST(SafetensorsHeaderTest, LimitsTheHeader) {
  std::string json = one("a");
  json.resize(kMaxHeaderBytes, ' ');
  EXPECT_EQ(read(json, 4).size(), 1U);
  json.push_back(' ');
  expect_refused(make_file(json, 4), "over the limit", "");
  EXPECT_THROW(parse_safetensors_header(json, json.size() + 12, "x"), AdapterFormatError);
}

TEST(SafetensorsHeaderTest, MessagesStayShortAndOnOneLine) {
  const std::string name = std::string("line\\n") + std::string(100'000, 'x');
  try {
    read(one(name, "F31"), 4);
    FAIL() << "accepted";
  } catch (const AdapterFormatError& error) {
    const std::string message = error.what();
    EXPECT_LT(message.size(), 300U);
    EXPECT_EQ(message.find('\n'), std::string::npos);
    EXPECT_EQ(error.tensor.size(), 100'005U);
  }
}

std::string realistic_file() {
  const std::string name = "base_model.model.layers.0.self_attn.q_proj.lora_";
  return make_file(object({R"("__metadata__":{"format":"pt"})",
                           entry(name + "A.weight", "F32", "[8,16]", "[0,512]"),
                           entry(name + "\\u0042.weight", "BF16", "[24,8]", "[512,896]")}) +
                       "  ",
                   896);
}

TEST(SafetensorsHeaderTest, RefusesEveryPrefixOfAGoodFile) {
  const std::string file = realistic_file();
  ASSERT_EQ(read_file(file).size(), 2U);
  for (std::size_t length = 0; length < file.size(); ++length) {
    EXPECT_THROW(read_file(file.substr(0, length)), AdapterFormatError) << length;
  }
  const std::string json = file.substr(8, file.size() - 8 - 896);
  for (std::size_t length = 0; length < json.size() - 2; ++length) {  // the last two are padding
    EXPECT_THROW(read(json.substr(0, length), 896), AdapterFormatError) << length;
  }
}

// Whatever is changed, the result is a refusal or a list of tensors that tile the data section.
TEST(SafetensorsHeaderTest, ChangedBytesNeverDoHarm) {
  constexpr std::uint32_t kSeed = 4711;
  std::mt19937 random(kSeed);
  const std::string good = realistic_file();
  const std::size_t header_end = good.size() - 896;
  for (int round = 0; round < 20'000; ++round) {
    std::string file = good;
    for (std::uint32_t changes = random() % 4 + 1; changes > 0; --changes) {
      const std::size_t place = random() % header_end;
      file[place] = random() % 2 == 0 ? static_cast<char>(random() % 256)
                                      : good[8 + random() % (header_end - 8)];
    }
    try {
      std::uint64_t total = 0;
      for (const TensorHeader& tensor : read_file(file)) {
        EXPECT_LE(tensor.offset + tensor.num_bytes, file.size());
        total += tensor.num_bytes;
      }
      EXPECT_LE(total, file.size()) << "seed " << kSeed << " round " << round;
    } catch (const AdapterFormatError&) {
    }
  }
}

}  // namespace
}  // namespace pagedlora
