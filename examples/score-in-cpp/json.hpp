// Reads JSON: a package's manifest.json, and the headers of safetensors files. Any JSON library does as well.
#pragma once

#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

class Json {
 public:
  using List = std::vector<Json>;
  using Object = std::map<std::string, Json>;

  static Json parse(std::string_view text) {
    Reader reader{text};
    Json found = reader.value();
    if (reader.next() != '\0') throw std::runtime_error("there is more after the JSON's end");
    return found;
  }

  bool has(const std::string& key) const { return object().count(key) > 0; }
  const Json& operator[](const std::string& key) const {
    auto found = object().find(key);
    if (found == object().end()) throw std::runtime_error("there is no '" + key + "'");
    return found->second;
  }
  const Json& operator[](size_t place) const { return list().at(place); }
  const List& list() const { return get<List>("list"); }
  const Object& object() const { return get<Object>("object"); }
  const std::string& text() const { return get<std::string>("text"); }
  double number() const { return get<double>("number"); }
  int64_t whole() const { return static_cast<int64_t>(number()); }
  bool is_null() const { return std::holds_alternative<std::nullptr_t>(held_); }
  // What is there under a key that may be missing, and false if it is.
  bool truth(const std::string& key) const { return has(key) && (*this)[key].get<bool>("bool"); }

 private:
  std::variant<std::nullptr_t, bool, double, std::string, List, Object> held_ = nullptr;

  template <class T>
  const T& get(const char* what) const {
    if (auto* found = std::get_if<T>(&held_)) return *found;
    throw std::runtime_error(std::string("a value is no ") + what);
  }

  struct Reader {
    std::string_view text;
    size_t at = 0;

    // The next character that is no white space; 0 at the end.
    char next() {
      while (at < text.size() && std::string_view(" \t\r\n").find(text[at]) != std::string_view::npos) ++at;
      return at < text.size() ? text[at] : '\0';
    }

    void take(std::string_view wanted) {
      next();
      if (text.substr(at, wanted.size()) != wanted) {
        throw std::runtime_error("no JSON at byte " + std::to_string(at));
      }
      at += wanted.size();
    }

    Json value() {
      Json made;
      switch (next()) {
        case '{': {
          Object object;
          for (take("{"); next() != '}';) {
            if (!object.empty()) take(",");
            std::string key = string();
            take(":");
            object.emplace(std::move(key), value());
          }
          take("}");
          made.held_ = std::move(object);
          break;
        }
        case '[': {
          List list;
          for (take("["); next() != ']';) {
            if (!list.empty()) take(",");
            list.push_back(value());
          }
          take("]");
          made.held_ = std::move(list);
          break;
        }
        case '"': made.held_ = string(); break;
        case 't': take("true"); made.held_ = true; break;
        case 'f': take("false"); made.held_ = false; break;
        case 'n': take("null"); break;
        default: {
          std::string number(text.substr(at, 40));
          char* end = nullptr;
          made.held_ = std::strtod(number.c_str(), &end);
          if (end == number.c_str()) throw std::runtime_error("no JSON at byte " + std::to_string(at));
          at += end - number.c_str();
        }
      }
      return made;
    }

    std::string string() {
      std::string made;
      for (take("\""); at < text.size() && text[at] != '"';) {
        char c = text[at++];
        if (c != '\\') {
          made += c;
          continue;
        }
        constexpr std::string_view names = "bfnrt", controls = "\b\f\n\r\t";
        c = text.at(at++);
        if (c == 'u') {
          append(made, code());
        } else if (auto place = names.find(c); place != std::string_view::npos) {
          made += controls[place];
        } else {
          made += c;
        }
      }
      take("\"");
      return made;
    }

    // The number of a character that is written as \uXXXX, or as two of these.
    unsigned code() {
      auto four = [this] {
        at += 4;
        return static_cast<unsigned>(std::stoul(std::string(text.substr(at - 4, 4)), nullptr, 16));
      };
      unsigned first = four();
      if (first < 0xD800 || first > 0xDBFF) return first;
      take("\\u");
      return 0x10000 + ((first - 0xD800) << 10) + (four() - 0xDC00);
    }

    static void append(std::string& made, unsigned code) {  // in UTF-8
      if (code < 0x80) {
        made += static_cast<char>(code);
        return;
      }
      int rest = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
      made += static_cast<char>((0xF0 << (3 - rest)) | (code >> (6 * rest)));
      while (rest-- > 0) made += static_cast<char>(0x80 | ((code >> (6 * rest)) & 0x3F));
    }
  };
};
